"""Multi-head latent attention with an output gate: see `interlock.ops.latent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlock.cache.storage import zeros
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Projection, Shapes
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.source import WeightSource

if TYPE_CHECKING:
    from interlock.engine.batch import Batch


class MLA:
    """One layer. Heads are shared out over the ranks; every rank has the whole latent cache."""

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        first, last = build.tp.share(config.num_attention_heads)
        self._heads, self._first = last - first, first
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._scale = (self._nope + self._rope) ** -0.5
        self._make_queries()
        latent = [(f"{name}.kv_a_proj_with_mqa", config.latent_size)]
        self.kv_a = Projection(f"{name}.kv_a_proj", config.hidden_size, latent, build)
        self.kv_norm = self._norm("kv_a_layernorm", config.kv_lora_rank)
        inner = config.num_attention_heads * config.v_head_dim
        self.gate = self._out("g_proj", inner) if config.mla_use_output_gate else None
        self.o = Projection(
            f"{name}.o_proj",
            inner,
            [(f"{name}.o_proj", config.hidden_size)],
            build,
            shard="in",
            unit=config.v_head_dim,
        )
        self.cache: Tensor

    def _make_queries(self) -> None:
        config, rank = self._config, self._config.q_lora_rank
        rows, unit = config.num_attention_heads * (self._nope + self._rope), self._nope + self._rope
        last = f"{self._name}.{'q_proj' if rank is None else 'q_b_proj'}"
        self.q_a = self.q_norm = None
        if rank is not None:
            name = f"{self._name}.q_a_proj"
            self.q_a = Projection(name, config.hidden_size, [(name, rank)], self._build)
            self.q_norm = self._norm("q_a_layernorm", rank)
        width = config.hidden_size if rank is None else rank
        self.q_b = Projection(last, width, [(last, rows)], self._build, shard="out", unit=unit)

    def _norm(self, part: str, size: int) -> RMSNorm:
        eps = self._config.mla_norm_eps
        return RMSNorm(f"{self._name}.{part}", size, eps, self._build.ops)

    def _out(self, part: str, rows: int) -> Projection:
        name, unit = f"{self._name}.{part}", self._config.v_head_dim
        hidden = self._config.hidden_size
        return Projection(name, hidden, [(name, rows)], self._build, shard="out", unit=unit)

    def _projections(self) -> list[Projection]:
        return [p for p in (self.q_a, self.q_b, self.kv_a, self.gate, self.o) if p is not None]

    def _norms(self) -> list[RMSNorm]:
        return [norm for norm in (self.q_norm, self.kv_norm) if norm is not None]

    def expected(self) -> Shapes:
        config = self._config
        shapes: Shapes = {f"{norm.name}.weight": (norm.size,) for norm in self._norms()}
        for projection in self._projections():
            shapes |= projection.expected()
        rows = config.num_attention_heads * (self._nope + config.v_head_dim)
        return shapes | {f"{self._name}.kv_b_proj.weight": (rows, config.kv_lora_rank)}

    def load(self, source: WeightSource) -> None:
        build, config = self._build, self._config
        for projection in self._projections():
            projection.load(source)
        for norm in self._norms():
            norm.load(source, build.dtype, build.device)
        whole = source.get(f"{self._name}.kv_b_proj.weight").dense(build.dtype)
        heads = whole.view(config.num_attention_heads, -1, config.kv_lora_rank)
        mine = heads[self._first : self._first + self._heads].to(build.device)
        self._k_up = mine[:, : self._nope].contiguous()
        self._v_up = mine[:, self._nope :].contiguous()

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size, self._config.latent_size)
        self.cache = zeros(shape, self._build.dtype, self._build.device)

    def __call__(self, x: Tensor, batch: Batch, cos_sin: Tensor | None) -> Tensor:
        """X [T, D] to [T, D]; the step's latents are written to the cache."""
        ops = self._build.ops
        q = self.q_b(x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x)))
        q = q.unflatten(-1, (self._heads, -1))
        latent = self.kv_a(x)
        rank = self._config.kv_lora_rank
        k_pe = latent[:, rank:]
        if cos_sin is not None:
            turns = cos_sin[batch.positions]
            k_pe = rotate_pairs(k_pe, turns)
            q = torch.cat([q[..., : self._nope], rotate_pairs(q[..., self._nope :], turns)], -1)
        stored = torch.cat([self.kv_norm(latent[:, :rank].contiguous()), k_pe], dim=-1)
        ops.latent_store(stored, self.cache, batch.slot_mapping)
        mixed = ops.mla_attention(q, self.cache, self._k_up, self._v_up, batch, self._scale)
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        return self.o(mixed)


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding on neighbouring elements: x [T, ..., P], turns [T, 2, P / 2] cos, sin."""
    shape = (len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = turns[:, 0].reshape(shape), turns[:, 1].reshape(shape)
    even, odd = x[..., 0::2].to(turns.dtype), x[..., 1::2].to(turns.dtype)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
