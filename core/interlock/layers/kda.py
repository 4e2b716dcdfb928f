"""A layer of Kimi Delta Attention with its recurrent states: see `interlock.ops.kda`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlock.cache.storage import zeros
from interlock.layers.projection import Build, Projection, Shapes, widened
from interlock.ops.kda import unit
from interlock.ops.reference import wide
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.source import WeightSource

if TYPE_CHECKING:
    from interlock.engine.batch import Batch


class KDA:
    """One layer. Heads are shared out over the ranks, and with them states and windows.

    A slot of ``states`` [slots, H, K, V] (wide) and ``windows`` [slots, k - 1, 3 H K] (the last
    inputs of the convolutions of q, k and v) belongs to one sequence.
    """

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        self._dim, self._eps = config.kda_head_dim, config.rms_norm_eps
        first, last = build.tp.share(config.kda_num_heads)
        self._heads, self._first = last - first, first
        hidden, size = config.hidden_size, config.kda_size
        parts = [(f"{name}.{part}_proj", size) for part in ("q", "k", "v")]
        if config.use_full_rank_gate:
            parts.append((f"{name}.g_proj", size))
        self.qkvg = Projection(
            f"{name}.qkvg_proj", hidden, parts, build, shard="out", unit=self._dim
        )
        low = [(f"{name}.f_a_proj", self._dim)]
        if not config.use_full_rank_gate:
            low.append((f"{name}.g_a_proj", self._dim))
        self.low = Projection(f"{name}.low_rank_proj", hidden, low, build)
        self.f_b = self._second("f_b_proj")
        self.g_b = None if config.use_full_rank_gate else self._second("g_b_proj")
        # Beta in half precision costs accuracy that can be measured (K3's vendors report it).
        self.beta = Projection(
            f"{name}.b_proj",
            hidden,
            [(f"{name}.b_proj", config.kda_num_heads)],
            widened(build),
            shard="out",
        )
        self.o = Projection(
            f"{name}.o_proj", size, [(f"{name}.o_proj", hidden)], build, shard="in", unit=self._dim
        )
        self.states: Tensor
        self.windows: Tensor
        self._versions: list[tuple[int, list[Tensor], Tensor]] = []

    def _second(self, part: str) -> Projection:
        name = f"{self._name}.{part}"
        parts = [(name, self._config.kda_size)]
        return Projection(name, self._dim, parts, self._build, shard="out", unit=self._dim)

    def _projections(self) -> list[Projection]:
        given = (self.qkvg, self.low, self.f_b, self.g_b, self.beta, self.o)
        return [projection for projection in given if projection is not None]

    def expected(self) -> Shapes:
        """``A_log`` may have more entries than heads: see `load`."""
        config, name = self._config, self._name
        shapes: Shapes = {}
        for projection in self._projections():
            shapes |= projection.expected()
        for part in ("q", "k", "v"):
            taps = config.short_conv_kernel_size
            shapes[f"{name}.{part}_conv1d.weight"] = (config.kda_size, 1, taps)
        shapes[f"{name}.A_log"] = (config.kda_num_heads,)
        shapes[f"{name}.dt_bias"] = (config.kda_size,)
        shapes[f"{name}.o_norm.weight"] = (self._dim,)
        return shapes

    def load(self, source: WeightSource) -> None:
        """K3 pads ``A_log`` with zeros behind the heads; older files give it four dimensions."""
        for projection in self._projections():
            projection.load(source)
        kind, device, name = wide(self._build.dtype), self._build.device, self._name
        start, stop = self._first * self._dim, (self._first + self._heads) * self._dim

        def read(part: str) -> Tensor:
            return source.get(f"{name}.{part}").dense(kind)

        convs = [read(f"{part}_conv1d.weight")[start:stop, 0] for part in ("q", "k", "v")]
        self._conv = torch.cat(convs).to(device)
        heads = slice(self._first, self._first + self._heads)
        self._a_log = read("A_log").flatten()[heads].to(device)
        biases = read("dt_bias").view(-1, self._dim)[heads]
        self._dt_bias = biases.contiguous().to(device)
        self._norm = read("o_norm.weight").to(device)

    # -- states --------------------------------------------------------------------------------

    def allocate(self, num_states: int) -> None:
        taps, dim = self._config.short_conv_kernel_size, self._dim
        build = self._build
        state = (num_states, self._heads, dim, dim)
        window = (num_states, taps - 1, 3 * self._heads * dim)
        self.states = zeros(state, wide(build.dtype), build.device)
        self.windows = zeros(window, build.dtype, build.device)

    def bytes_per_slot(self) -> int:
        dim, build = self._dim, self._build
        window = (self._config.short_conv_kernel_size - 1) * 3 * self._heads * dim
        state = self._heads * dim * dim * wide(build.dtype).itemsize
        return state + window * build.dtype.itemsize

    def clear(self, slots: Tensor) -> None:
        self.states[slots] = 0
        self.windows[slots] = 0

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self.states[targets] = self.states[sources]
        self.windows[targets] = self.windows[sources]

    def settle(self, kept: Sequence[int]) -> None:
        """Verify row i of the last batch keeps the state after its first ``kept[i]`` tokens."""
        for (slot, states, history), count in zip(self._versions, kept, strict=True):
            self.states[slot] = states[count]
            self.windows[slot] = history[count : count + self.windows.shape[1]]
        self._versions = []

    # -- forward -------------------------------------------------------------------------------

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """X [T, D] to [T, D]; states and windows of the rows' slots advance."""
        size = self._heads * self._dim
        qkvg = self.qkvg(x)
        low = self.low(x)
        qkv = qkvg[:, : 3 * size]
        gate = qkvg[:, 3 * size :] if self.g_b is None else self.g_b(low[:, self._dim :])
        z = self.f_b(low[:, : self._dim]).unflatten(-1, (self._heads, self._dim))
        g = self._build.ops.kda_gate(z, self._a_log, self._dt_bias, self._config.gate_lower_bound)
        beta = torch.sigmoid(self.beta(x.to(self._a_log.dtype)))
        out = self._mix(qkv, g, beta, batch)
        normed = self._build.ops.gated_norm(out, gate, self._norm, self._eps)
        return self.o(normed)

    def _mix(self, qkv: Tensor, g: Tensor, beta: Tensor, batch: Batch) -> Tensor:
        out = g.new_empty(g.shape)
        self._versions = []
        starts = batch.starts
        for row in range(*batch.verify.rows):
            tokens = slice(starts[row], starts[row + 1])
            out[tokens] = self._verify(row, qkv[tokens], g[tokens], beta[tokens], batch)
        if len(batch.decode.rows):
            tokens = slice(*batch.decode.tokens)
            slots = batch.state_index[batch.decode.rows.start : batch.decode.rows.stop]
            out[tokens] = self._decode(slots, qkv[tokens], g[tokens], beta[tokens])
        for row in range(*batch.prefill.rows):
            tokens = slice(starts[row], starts[row + 1])
            out[tokens] = self._prefill(row, qkv[tokens], g[tokens], beta[tokens], batch)
        out[starts[-1] :] = 0
        return out

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q (normalized and scaled), k (normalized) and v, each [..., H, K]."""
        parts = mixed.chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self._heads, self._dim)) for part in parts)
        return unit(q) * self._dim**-0.5, unit(k), v

    def _decode(self, slots: Tensor, qkv: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ops = self._build.ops
        mixed, history = ops.causal_conv(qkv[:, None], self.windows[slots], self._conv)
        q, k, v = self._heads_of(mixed)
        out, states = ops.kda_recurrent(q, k, v, g[:, None], beta[:, None], self.states[slots])
        self.states[slots] = states[-1]
        self.windows[slots] = history[:, 1:]
        return out[:, 0]

    def _verify(self, row: int, qkv: Tensor, g: Tensor, beta: Tensor, batch: Batch) -> Tensor:
        """As decode, token by token; the slot itself stays as it was until `settle`."""
        ops, slot = self._build.ops, batch.state_slots[row]
        mixed, history = ops.causal_conv(qkv[None], self.windows[slot][None], self._conv)
        q, k, v = self._heads_of(mixed)
        state = self.states[slot][None].clone()
        out, states = ops.kda_recurrent(q, k, v, g[None], beta[None], state)
        self._versions.append((slot, [s[0] for s in (state, *states)], history[0]))
        return out[0]

    def _prefill(self, row: int, qkv: Tensor, g: Tensor, beta: Tensor, batch: Batch) -> Tensor:
        ops, slot = self._build.ops, batch.state_slots[row]
        mixed, history = ops.causal_conv(qkv[None], self.windows[slot][None], self._conv)
        q, k, v = (part[0] for part in self._heads_of(mixed))
        exports = batch.exports[row]
        positions = sorted({position for position, _ in exports})
        out, state, exported = ops.kda_chunk(q, k, v, g, beta, self.states[slot], positions)
        width = self.windows.shape[1]
        for position, target in exports:
            self.states[target] = exported[positions.index(position)]
            self.windows[target] = history[0, position : position + width]
        self.states[slot] = state
        self.windows[slot] = history[0, len(qkv) : len(qkv) + width]
        return out
