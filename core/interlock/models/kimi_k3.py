"""Kimi K3's text model, and Kimi-Linear as other values of the same switches.

Layers of Kimi Delta Attention with a recurrent state, every fourth and the last one with latent
attention over a paged cache; feed-forward by a mixture of experts. Between them, block attention
residuals: a layer reads a learned mix of earlier blocks' sums, and adds to the current block's.
Sources of the formulas stand with `interlock.ops.kda`, `.latent` and `.experts`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from interlock.errors import WeightsError
from interlock.layers.embedding import Head, VocabEmbedding
from interlock.layers.kda import KDA
from interlock.layers.mla import MLA
from interlock.layers.mlp import MLP
from interlock.layers.moe import MoE, gated_mlp
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Shapes
from interlock.layers.residual import ResidualMix
from interlock.layers.rope import frequencies_table
from interlock.models.checking import require
from interlock.ops import OpTable
from interlock.parallel.group import SINGLE, TensorParallel
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.gguf_header import summary
from interlock.weights.source import WeightSource

if TYPE_CHECKING:
    from interlock.engine.batch import Batch
    from interlock.extension import ExpertLayer, ExpertMethod

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
# The vision part of K3's checkpoints; this engine takes text only.
_VISION: Final = ("vision_tower.", "mm_projector.")


class KimiLayer:
    """Attention of either kind and a feed-forward block, with what they read from."""

    def __init__(self, name: str, index: int, config: KimiConfig, build: Build) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention = MLA if config.is_full_attention(index) else KDA
        self.attention = attention(f"{name}.self_attn", config, build)
        if config.is_moe(index):
            self.mlp: MoE | MLP = MoE(f"{name}.block_sparse_moe", config, build)
        else:
            self.mlp = gated_mlp(f"{name}.mlp", config, config.intermediate_size, build)
        self.input_norm = RMSNorm(f"{name}.input_layernorm", hidden, eps, build.ops)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps, build.ops)
        self.mixes: tuple[ResidualMix, ...] = ()
        if config.attn_res_block_size is not None:
            names = (f"{name}.self_attention_res", f"{name}.mlp_res")
            self.mixes = tuple(ResidualMix(n, hidden, eps, build) for n in names)
        self._build = build

    def expected(self) -> Shapes:
        shapes: Shapes = {f"{n.name}.weight": (n.size,) for n in (self.input_norm, self.mlp_norm)}
        for mix in self.mixes:
            shapes |= mix.expected()
        return shapes | self.attention.expected() | self.mlp.expected()

    def load(self, source: WeightSource) -> None:
        for part in (self.attention, self.mlp, *self.mixes):
            part.load(source)
        for norm in (self.input_norm, self.mlp_norm):
            norm.load(source, self._build.dtype, self._build.device)

    def attend(self, x: Tensor, batch: Batch, cos_sin: Tensor | None) -> Tensor:
        normed = self.input_norm(x)
        if isinstance(self.attention, KDA):
            return self.attention(normed, batch)
        return self.attention(normed, batch, cos_sin)

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


class KimiModel:
    """Weights, latent caches, state slots and the forward pass of one rank.

    After `forward`, ``taps`` has the running sums after the layers in ``tap_layers`` side by side,
    [T, len(tap_layers) * D]: what a drafter is conditioned on.
    """

    def __init__(
        self,
        config: KimiConfig,
        ops: OpTable,
        linear_method: Callable[..., Any],
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool | None = None,
        tp: TensorParallel = SINGLE,
        expert_method: Callable[[ExpertLayer], ExpertMethod | None] = lambda _: None,
    ) -> None:
        config.check_tp(tp.size)
        self.config = config
        self.tap_layers: tuple[int, ...] = ()
        self.taps: Tensor | None = None
        self.num_parameters = 0
        self.weight_bytes = 0
        build = self._build = Build(
            ops, linear_method, dtype, device, batch_invariant, tp, expert_method=expert_method
        )
        root, size, vocab = f"{config.prefix}model", config.hidden_size, config.vocab_size
        self._embedding = f"{root}.embed_tokens.weight"
        self.embedding = VocabEmbedding(self._embedding, vocab, size, build)
        self.layers = [
            KimiLayer(f"{root}.layers.{index}", index, config, build)
            for index in range(config.num_hidden_layers)
        ]
        self.output_mix = None
        if config.attn_res_block_size is not None:
            self.output_mix = ResidualMix(
                f"{root}.output_attn_res", size, config.rms_norm_eps, build
            )
        self.norm = RMSNorm(f"{root}.norm", size, config.rms_norm_eps, ops)
        tied = self._embedding.removesuffix(".weight")
        head = tied if config.tie_word_embeddings else f"{config.prefix}lm_head"
        self.head = Head("lm_head", head, size, vocab, build)
        self._cos_sin: Tensor | None = None

    # -- weights -------------------------------------------------------------------------------

    def expected_weights(self) -> Shapes:
        """Shape of every tensor that the checkpoint must have, by name."""
        shapes = self.embedding.expected() | {f"{self.norm.name}.weight": (self.norm.size,)}
        for layer in self.layers:
            shapes |= layer.expected()
        if self.output_mix is not None:
            shapes |= self.output_mix.expected()
        return shapes | self.head.expected()

    def load(self, source: WeightSource, progress: Progress | None = None) -> None:
        """Load all weights. Raises `WeightsError` for missing, misshapen or unknown tensors."""
        expected = self.expected_weights()
        check_weights(expected, source)
        infos = [source.infos[name] for name in expected]
        self.num_parameters = sum(math.prod(info.shape) for info in infos)
        self.weight_bytes = sum(info.nbytes for info in infos)
        for done, load in enumerate(self._loaders()):
            load(source)
            if progress is not None:
                progress("loading weights", (done + 1) / (len(self.layers) + 2))

    def _loaders(self) -> Iterator[Callable[[WeightSource], None]]:
        yield self.embedding.load
        for layer in self.layers:
            yield layer.load
        yield self._load_head

    def _load_head(self, source: WeightSource) -> None:
        config = self.config
        self.norm.load(source, self._build.dtype, self._build.device)
        self.head.load(source)
        if self.output_mix is not None:
            self.output_mix.load(source)
        if not config.mla_use_nope:
            table = frequencies_table(
                config.qk_rope_head_dim, config.rope_theta, config.max_position_embeddings
            )
            self._cos_sin = table.to(self._build.device)

    # -- caches --------------------------------------------------------------------------------

    def _recurrent(self) -> list[KDA]:
        return [layer.attention for layer in self.layers if isinstance(layer.attention, KDA)]

    def _latent(self) -> list[MLA]:
        return [layer.attention for layer in self.layers if isinstance(layer.attention, MLA)]

    def allocate_caches(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        """Latents [blocks, block_size, L] of MLA layers, ``num_states`` slots of KDA layers."""
        for attention in self._latent():
            attention.allocate_cache(num_blocks, block_size)
        for recurrent in self._recurrent():
            recurrent.allocate(num_states)

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes over all layers; the same on every rank."""
        return block_size * self.config.kv_bytes_per_token(self._build.dtype.itemsize)

    def state_bytes_per_slot(self) -> int:
        """Bytes that one sequence's states take over all layers, on this rank."""
        return sum(layer.bytes_per_slot() for layer in self._recurrent())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` in every layer."""
        for attention in self._latent():
            sources, targets = self._indices(pairs)
            attention.cache[targets] = attention.cache[sources]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots; all sources are read before a target is written."""
        sources, targets = self._indices(pairs)
        for layer in self._recurrent():
            layer.copy(sources, targets)

    def clear_states(self, slots: Sequence[int]) -> None:
        for layer in self._recurrent():
            layer.clear(torch.tensor(slots, device=self._build.device))

    def settle_states(self, kept: Sequence[int]) -> None:
        """The i-th verify row of the last batch continues from the state after kept[i] tokens."""
        for layer in self._recurrent():
            layer.settle(kept)

    def _indices(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        sources, targets = zip(*pairs, strict=True)
        device = self._build.device
        return torch.tensor(sources, device=device), torch.tensor(targets, device=device)

    # -- forward -------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """Write caches and states; final-normed hidden states [S, D] of the positions asked for."""
        self._build.kinds.leading = batch.decode.tokens.stop
        x = self.embedding(batch.token_ids)
        tapped: list[Tensor] = []
        x = (
            self._plain(x, batch, tapped)
            if self.output_mix is None
            else self._mixed(x, batch, tapped)
        )
        self.taps = torch.cat(tapped, dim=-1) if tapped else None
        if len(batch.logits_indices) < len(x):
            x = x[batch.logits_indices]
        return self.norm(x) if len(x) else x

    def _plain(self, x: Tensor, batch: Batch, tapped: list[Tensor]) -> Tensor:
        """The ordinary residual stream."""
        for index, layer in enumerate(self.layers):
            x = x + layer.attend(x, batch, self._cos_sin)
            x = x + layer.feed(x)
            if index in self.tap_layers:
                tapped.append(x)
        return x

    def _mixed(self, x: Tensor, batch: Batch, tapped: list[Tensor]) -> Tensor:
        """Block attention residuals: ``running`` is the current block's sum."""
        assert self.config.attn_res_block_size is not None
        assert self.output_mix is not None
        blocks: list[Tensor] = []
        running: Tensor = x
        for index, layer in enumerate(self.layers):
            before, between = layer.mixes
            read = before(blocks, running) if blocks else running
            attended = layer.attend(read, batch, self._cos_sin)
            if index % self.config.attn_res_block_size == 0:
                blocks, running = [*blocks, running], attended
            else:
                running = running + attended
            running = running + layer.feed(between(blocks, running))
            if index in self.tap_layers:
                tapped.append(running)
        return self.output_mix(blocks, running)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [S, D] to logits [S, V] in the model's dtype."""
        return self.head(hidden)


def check_weights(expected: Shapes, source: WeightSource) -> None:
    """Compare what a model needs with what its files have; everything that differs is an error."""
    require(expected, source, _fits)
    unknown = [name for name in source.infos if name not in expected]
    vision = [name for name in unknown if name.startswith(_VISION)]
    extra = [*source.unexpected, *(name for name in unknown if name not in set(vision))]
    if extra:
        raise WeightsError(
            f"{len(extra)} tensors of the model's files belong to no layer: {summary(extra)}"
        )
    if vision:
        logger.info("%d tensors of the vision part are left out: text only", len(vision))


def _fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """K3 pads ``A_log`` behind the heads, Kimi-Linear gives it more dimensions."""
    if name.endswith(".A_log"):
        return math.prod(found) >= wanted[0]
    return found == wanted
