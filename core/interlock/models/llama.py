"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3 (dense).

Pre-norm decoder layers of grouped-query attention and a gated MLP; the configuration says which
members have biases, q/k norms and a tied head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from interlock.errors import WeightsError
from interlock.layers.attention import Attention
from interlock.layers.embedding import Head, VocabEmbedding
from interlock.layers.mlp import MLP
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Shapes
from interlock.layers.rope import cos_sin_table
from interlock.models.checking import require
from interlock.ops import OpTable
from interlock.parallel.group import SINGLE, TensorParallel
from interlock.weights.config import ModelConfig
from interlock.weights.config_gguf import ROPE_FREQS
from interlock.weights.gguf_header import summary
from interlock.weights.source import TensorInfo, WeightSource

if TYPE_CHECKING:
    from interlock.engine.batch import Batch

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head"


class DecoderLayer:
    """Attention and MLP, each behind a norm that also adds the residual."""

    def __init__(self, name: str, config: ModelConfig, build: Build) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(f"{name}.self_attn", config, build)
        inner, bias = config.intermediate_size, config.mlp_bias
        self.mlp = MLP(f"{name}.mlp", hidden, inner, build, bias=bias)
        self.input_norm = RMSNorm(f"{name}.input_layernorm", hidden, eps, build.ops)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps, build.ops)
        self._build = build

    def expected(self) -> Shapes:
        norms = {f"{n.name}.weight": (n.size,) for n in (self.input_norm, self.mlp_norm)}
        return self.attention.expected() | self.mlp.expected() | norms

    def load(self, source: WeightSource) -> None:
        self.attention.load(source)
        self.mlp.load(source)
        for norm in (self.input_norm, self.mlp_norm):
            norm.load(source, self._build.dtype, self._build.device)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, batch: Batch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``x`` and ``residual`` [T, H] to the same; only of ``rows`` if they are given."""
        if residual is None:
            residual, normed = x, self.input_norm(x)
        else:
            normed, residual = self.input_norm.add(x, residual)
        q = self.attention.store(normed, cos_sin, batch)
        if rows is not None and not len(rows):
            return normed[:0], residual[:0]
        attended = self.attention.attend(q, batch)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        normed, residual = self.mlp_norm.add(self.attention.o(attended), residual)
        return self.mlp(normed), residual


class LlamaModel:
    """Weights, caches and the forward pass of one model on one device.

    ``linear_method`` is asked for every linear layer (see ``interlock_linear_method``).
    ``max_positions`` shortens the table of rotary embeddings.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: OpTable,
        linear_method: Callable[..., Any],
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_invariant: bool | None = None,
        tp: TensorParallel = SINGLE,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.num_parameters = 0
        self.weight_bytes = 0
        self.tap_layers: tuple[int, ...] = ()
        self.taps: Tensor | None = None
        config.check_tp(tp.size)
        self._build = Build(ops, linear_method, dtype, device, batch_invariant, tp)
        self._positions = max_positions or config.max_position_embeddings
        self.layers = [
            DecoderLayer(f"model.layers.{index}", config, self._build)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, ops)
        tied = config.tie_word_embeddings
        head = _EMBEDDING.removesuffix(".weight") if tied else _HEAD
        size, vocab = config.hidden_size, config.vocab_size
        self.embedding = VocabEmbedding(_EMBEDDING, vocab, size, self._build)
        self.head = Head(_HEAD, head, size, vocab, self._build)
        self.cos_sin: Tensor

    def expected_weights(self) -> Shapes:
        """Shape of every tensor that the checkpoint must have, by name."""
        shapes: Shapes = self.embedding.expected()
        for layer in self.layers:
            shapes |= layer.expected()
        return shapes | {"model.norm.weight": (self.config.hidden_size,)} | self.head.expected()

    def load(self, source: WeightSource, progress: Progress | None = None) -> None:
        """Load all weights, after checking that every one is there and has the right shape.

        Raises `WeightsError` naming missing or misshapen tensors before any weight is read;
        unexpected tensors are reported in one warning.
        """
        expected = self.expected_weights()
        check_weights(expected, source, self.config)
        infos = [source.infos[name] for name in expected]
        self.num_parameters = sum(math.prod(info.shape) for info in infos)
        self.weight_bytes = sum(info.nbytes for info in infos)
        for done, load in enumerate(self._loaders()):
            load(source)
            if progress is not None:
                progress("loading weights", (done + 1) / (len(self.layers) + 2))

    def _loaders(self) -> Iterator[Callable[[WeightSource], None]]:
        yield self._load_embedding
        for layer in self.layers:
            yield layer.load
        yield self._load_head

    def _load_embedding(self, source: WeightSource) -> None:
        self.embedding.load(source)
        divisors = source.get(ROPE_FREQS).dense(torch.float32) if _has_divisors(source) else None
        self.cos_sin = cos_sin_table(self.config, self._positions, divisors).to(self._build.device)

    def _load_head(self, source: WeightSource) -> None:
        self.norm.load(source, self._build.dtype, self._build.device)
        self.head.load(source)

    def allocate_caches(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        """Allocate zeroed keys and values of all layers; there are no states."""
        assert num_states == 0
        attention = self.layers[0].attention
        self._build.ops.prepare(attention.heads, attention.kv_heads, self.config.head_dim)
        for layer in self.layers:
            layer.attention.allocate_cache(num_blocks, block_size)

    def state_bytes_per_slot(self) -> int:
        return 0

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes on this rank over all layers, keys and values together."""
        heads = self.layers[0].attention.kv_heads
        per_token = 2 * len(self.layers) * heads * self.config.head_dim
        return block_size * per_token * self._build.dtype.itemsize

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` in every layer; no target is also a source."""
        sources, targets = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for layer in self.layers:
            for cache in (layer.attention.k_cache, layer.attention.v_cache):
                cache[targets.to(cache.device)] = cache[sources.to(cache.device)]

    def forward(self, batch: Batch) -> Tensor:
        """Write the step's keys and values; final-normed hidden states [S, H] of the rows asked."""
        # All tokens of verify and decode rows have logits, so they lead the asked rows as well.
        self._build.kinds.leading = batch.decode.tokens.stop
        x: Tensor = self.embedding(batch.token_ids)
        tapped: list[Tensor] = []
        residual: Tensor | None = None
        everything = len(batch.logits_indices) == len(batch.token_ids)
        last = None if everything or self.tap_layers else self.layers[-1]
        for index, layer in enumerate(self.layers):
            rows = batch.logits_indices if layer is last else None
            x, residual = layer(x, residual, self.cos_sin, batch, rows)
            if index in self.tap_layers:
                tapped.append(x + residual)
        self.taps = torch.cat(tapped, dim=-1) if tapped else None
        assert residual is not None
        if last is None and not everything:
            x, residual = x[batch.logits_indices], residual[batch.logits_indices]
        return self.norm.add(x, residual)[0] if len(x) else x

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [S, H] to logits [S, V] in the model's dtype."""
        return self.head(hidden)


def _has_divisors(source: WeightSource) -> bool:
    return ROPE_FREQS in source.infos


def check_weights(expected: Shapes, source: WeightSource, config: ModelConfig) -> None:
    """Compare what a model needs with what its files have."""
    require(expected, source)
    _check_divisors(source.infos.get(ROPE_FREQS), config)
    optional = {ROPE_FREQS, f"{_HEAD}.weight"} if config.tie_word_embeddings else {ROPE_FREQS}
    extra = [name for name in source.infos if name not in expected and name not in optional]
    if unexpected := [*source.unexpected, *extra]:
        logger.warning(
            "%d tensors of the model's files are not used: %s",
            len(unexpected),
            summary(unexpected),
        )


def _check_divisors(info: TensorInfo | None, config: ModelConfig) -> None:
    if info is not None and info.shape != (config.head_dim // 2,):
        raise WeightsError(
            f"rope_freqs.weight is {list(info.shape)} instead of [{config.head_dim // 2}]"
        )
