"""Grouped-query attention over the paged cache, with rotary embedding and optional q/k norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from interlock.cache.storage import zeros
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Projection, Shapes
from interlock.weights.config import ModelConfig
from interlock.weights.source import WeightSource

if TYPE_CHECKING:
    from interlock.engine.batch import Batch


class Attention:
    """One layer's attention. ``k_cache`` and ``v_cache`` are set by `allocate_cache`."""

    def __init__(self, name: str, config: ModelConfig, build: Build) -> None:
        self._build = build
        tp = build.tp
        self.heads = config.num_attention_heads // tp.size
        self.kv_heads = max(1, config.num_key_value_heads // tp.size)
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self.qkv = Projection(
            f"{name}.qkv_proj",
            config.hidden_size,
            [
                (f"{name}.q_proj", config.q_size),
                (f"{name}.k_proj", config.kv_size),
                (f"{name}.v_proj", config.kv_size),
            ],
            build,
            bias=config.attention_bias,
            shard="out",
            unit=config.head_dim,
        )
        self.o = Projection(
            f"{name}.o_proj",
            config.q_size,
            [(f"{name}.o_proj", config.hidden_size)],
            build,
            bias=config.attention_output_bias,
            shard="in",
            unit=config.head_dim,
        )
        self._norms = self._make_norms(name, config) if config.qk_norm else ()
        self.k_cache: Tensor
        self.v_cache: Tensor

    def _make_norms(self, name: str, config: ModelConfig) -> tuple[RMSNorm, RMSNorm]:
        size, eps, ops = config.head_dim, config.rms_norm_eps, self._build.ops
        return RMSNorm(f"{name}.q_norm", size, eps, ops), RMSNorm(f"{name}.k_norm", size, eps, ops)

    def expected(self) -> Shapes:
        norms = {f"{norm.name}.weight": (norm.size,) for norm in self._norms}
        return self.qkv.expected() | self.o.expected() | norms

    def load(self, source: WeightSource) -> None:
        self.qkv.load(source)
        self.o.load(source)
        for norm in self._norms:
            norm.load(source, self._build.dtype, self._build.device)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size, self.kv_heads, self._head_dim)
        self.k_cache = zeros(shape, self._build.dtype, self._build.device)
        self.v_cache = zeros(shape, self._build.dtype, self._build.device)

    def store(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Write this step's keys and values to the cache; returns the queries [T, Hq, D]."""
        qkv = self.qkv(x)
        if self._norms:
            self._normalize(qkv)
        return self._build.ops.rope_store(
            qkv,
            cos_sin,
            batch.positions,
            self.k_cache,
            self.v_cache,
            batch.slot_mapping,
            self.heads,
            self.kv_heads,
        )

    def _normalize(self, qkv: Tensor) -> None:
        """Normalize every head of q and k in place."""
        start = 0
        for norm, heads in zip(self._norms, (self.heads, self.kv_heads), strict=True):
            columns = qkv[:, start : start + heads * self._head_dim]
            normed = norm(columns.reshape(-1, self._head_dim))
            columns.copy_(normed.view(columns.shape))
            start += heads * self._head_dim

    def attend(self, q: Tensor, batch: Batch) -> Tensor:
        """Attention of all rows, before the output projection: [T, Hq * D]."""
        return self._build.ops.attention(q, self.k_cache, self.v_cache, batch, self._scale)
