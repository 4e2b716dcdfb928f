"""The ops of the op table on numba kernels, and what to say where they can't be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interlock.ops import torch_ops
from interlock.ops.cpu_attention import PagedAttention, attend_kernel
from interlock.ops.cpu_elementwise import Elementwise
from interlock.ops.cpu_linear import dense_unsupported
from interlock.ops.cpu_prefill import PrefillAttention, pack_kernel, prefill_kernel
from interlock.ops.launch import team, unsupported

DTYPES = (torch.bfloat16, torch.float32)
SIMPLE = ("rms_norm", "add_rms_norm", "silu_mul", "rope_store")
HEAD_STEP = 16
"""Head sizes must be a multiple of this: one vector."""


class CpuAttention:
    """Verify and decode rows read the pool in place, prefill rows gather their context."""

    def __init__(self) -> None:
        self._few = PagedAttention()
        self._many = PrefillAttention()

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float
    ) -> Tensor:
        tokens, heads, dim = q.shape
        if dim % HEAD_STEP:
            return torch_ops.attention(q, k_cache, v_cache, batch, scale)
        out = torch.empty((tokens, heads * dim), dtype=q.dtype)
        self._few(q, k_cache, v_cache, batch, scale, out)
        self._many(q, k_cache, v_cache, batch, scale, out)
        if batch.prefill.tokens.stop < tokens:
            out[batch.prefill.tokens.stop :] = 0
        return out

    def prepare(self, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
        """Compile for this shape now instead of in the first step."""
        if head_dim % HEAD_STEP == 0:
            attend_kernel(dtype, head_dim, heads, kv_heads)
            pack_kernel(dtype, head_dim, kv_heads)
            prefill_kernel(dtype, head_dim, heads, kv_heads)


def unusable(dtype: torch.dtype) -> str | None:
    """Why the kernels can't run for ``dtype`` on this machine, or None."""
    if dtype not in DTYPES:
        return f"no kernels for {str(dtype).removeprefix('torch.')}"
    # Tiles of 16 lanes by 24 accumulators are made for the 32 registers of AVX-512.
    return unsupported() or dense_unsupported(dtype, 2)


def build(dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    """The ops by name, and how they run."""
    simple = Elementwise(dtype)
    ours = {name: getattr(simple, name) for name in SIMPLE} | {"attention": CpuAttention()}
    return ours, f"numba on {team().reason}"
