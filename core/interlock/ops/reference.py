"""Plain PyTorch of every op: any dtype, any device, obviously right. The oracle of all kernels.

Arithmetic runs in float32, or float64 for float64 tensors, and is rounded once to the result's
dtype. Nothing here is tuned; `interlock.ops.torch_ops` is what runs where no kernel does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``: x [T, H], weight [H] -> [T, H]."""
    v = x.to(wide(x.dtype))
    scale = torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    return (v * scale * weight.to(v.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of the sum, the sum), where the sum is ``x + residual`` in their dtype."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` for x [T, 2F], gate in its first half -> [T, F]."""
    gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Rotate q in place and store rotated k, and v, in the cache; returns q [T, Hq, D].

    qkv [T, (Hq + 2 Hk) D]; cos_sin [max_pos, 2, D/2] float32, cosines first; positions and
    slot_mapping [T] int64, where slot -1 writes nothing; caches [blocks, block_size, Hk, D].
    Element i of a head turns with element i + D/2 (Su et al. 2021, half-split layout).
    """
    head_dim = 2 * cos_sin.shape[2]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    turns = cos_sin[positions].to(wide(qkv.dtype))
    q.copy_(_rotate(q, turns))
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    k_cache.view(-1, num_kv_heads, head_dim)[slots] = _rotate(k, turns)[keep]
    v_cache.view(-1, num_kv_heads, head_dim)[slots] = v[keep]
    return q


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns[:, None, 0], turns[:, None, 1]
    a, b = x.to(turns.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float) -> Tensor:
    """Causal attention of every row over its own context -> [T, Hq * D].

    q [T, Hq, D]; caches [blocks, block_size, Hk, D]. Token i of a row with n tokens and a context
    of c sees positions 0 to c - n + i. Rows of the result that belong to no batch row are zero.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for count, context, table in zip(batch.query_lens, batch.context, batch.tables, strict=True):
        rows = slice(start, start + count)
        keys, values = (gather(cache, table, context) for cache in (k_cache, v_cache))
        out[rows] = attend(q[rows], keys, values, scale)
        start += count
    return out.flatten(1)


def gather(cache: Tensor, table: list[int], context: int) -> Tensor:
    """The first ``context`` entries of a sequence: [context, Hk, D]."""
    blocks = torch.tensor(table, dtype=torch.int64, device=cache.device)
    return cache[blocks].flatten(0, 1)[:context]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v of one row: q [n, Hq, D], k and v [c, Hk, D] -> [n, Hq, D]."""
    kind = wide(q.dtype)
    share = q.shape[1] // k.shape[1]
    k, v = (x.to(kind).repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(kind), k) * scale
    last = torch.arange(len(k) - len(q), len(k), device=q.device)
    future = torch.arange(len(k), device=q.device) > last[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
