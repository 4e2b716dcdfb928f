"""The ops on torch's own kernels: any device and dtype, and the fallback on a CPU without numba.

Everything but attention is already one or a few torch calls in `interlock.ops.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from interlock.ops import reference


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float) -> Tensor:
    """As `reference.attention`, one fused call per row, so that rows can't touch each other."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for row, (count, context) in enumerate(zip(batch.query_lens, batch.context, strict=True)):
        rows = slice(start, start + count)
        keys, values = (
            gather(cache, batch.block_tables[row], context) for cache in (k_cache, v_cache)
        )
        out[rows] = attend(q[rows], keys, values, scale)
        start += count
    out[start:] = 0
    return out.flatten(1)


def gather(cache: Tensor, table: Tensor, context: int) -> Tensor:
    """As `reference.gather`, with the block table where it is (no copy from the host)."""
    blocks = -(-context // cache.shape[1])
    return cache[table[:blocks].to(torch.int64)].flatten(0, 1)[:context]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `reference.attend`. q [n, Hq, D], k and v [c, Hk, D]."""
    count, context = len(q), len(k)
    # torch's is_causal aligns the mask with the first key, which is ours only without a prefix.
    mask = _mask(count, context, q.device) if 1 < count < context else None
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mixed: Tensor = scaled_dot_product_attention(
        heads_first[0],
        heads_first[1],
        heads_first[2],
        attn_mask=mask,
        is_causal=count == context and count > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed[0].transpose(0, 1)


def _mask(count: int, context: int, device: torch.device) -> Tensor:
    last = torch.arange(context - count, context, device=device)
    return torch.arange(context, device=device) <= last[:, None]


OPS: dict[str, Any] = {
    "rms_norm": reference.rms_norm,
    "add_rms_norm": reference.add_rms_norm,
    "silu_mul": reference.silu_mul,
    "rope_store": reference.rope_store,
    "attention": attention,
}
