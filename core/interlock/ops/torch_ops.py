"""The ops on torch's own kernels: any device and dtype, and the fallback on a CPU without numba.

Everything but attention is already one or a few torch calls in `interlock.ops.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from interlock.ops import experts, kda, latent, reference


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float) -> Tensor:
    """As `reference.attention`, row by row, so that rows can't touch each other.

    A decode row reads the cache where it lies. Rows of several tokens gather their context first,
    and so do decode rows in half precision whose blocks are scattered: their scores must not be
    rounded between two products.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for row, (count, context) in enumerate(zip(batch.query_lens, batch.context, strict=True)):
        rows = slice(start, start + count)
        found = runs(batch.tables[row], k_cache.shape[1], context) if count == 1 else []
        if len(found) > 1 and reference.wide(q.dtype) == q.dtype:
            out[start] = decode(q[start], k_cache, v_cache, found, scale)
        else:
            table = batch.block_tables[row]
            keys, values = (context_of(c, table, context, found) for c in (k_cache, v_cache))
            out[rows] = attend(q[rows], keys, values, scale)
        start += count
    out[start:] = 0
    return out.flatten(1)


def runs(table: list[int], block_size: int, context: int) -> list[tuple[int, int]]:
    """The slots of a context as few ranges: consecutive blocks are one range."""
    ranges: list[tuple[int, int]] = []
    for block in table[: -(-context // block_size)]:
        begin = block * block_size
        if ranges and ranges[-1][1] == begin:
            begin = ranges.pop()[0]
        ranges.append((begin, (block + 1) * block_size))
    begin, end = ranges.pop()
    return [*ranges, (begin, end - -context % block_size)]


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, found: list[tuple[int, int]], scale: float
) -> Tensor:
    """One query token over ranges of slots, without copying them. q [Hq, D] to the same."""
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    grouped = q.view(keys.shape[1], -1, q.shape[-1])
    scores = [grouped @ keys[a:b].permute(1, 2, 0) for a, b in found]
    weights = (torch.cat(scores, dim=-1) * scale).softmax(dim=-1)
    mixed, start = torch.zeros_like(grouped), 0
    for a, b in found:
        mixed += weights[..., start : start + b - a] @ values[a:b].transpose(0, 1)
        start += b - a
    return mixed.flatten(0, 1)


def context_of(cache: Tensor, table: Tensor, context: int, found: list[tuple[int, int]]) -> Tensor:
    """The entries of a sequence, [context, Hk, D]: a view of one range, else a copy."""
    if len(found) == 1:
        return cache.flatten(0, 1)[found[0][0] : found[0][1]]
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
    "causal_conv": kda.causal_conv,
    "kda_gate": kda.kda_gate,
    "kda_recurrent": kda.kda_recurrent,
    "kda_chunk": kda.kda_chunk,
    "gated_norm": kda.gated_norm,
    "residual_mix": kda.residual_mix,
    "latent_store": latent.latent_store,
    "mla_attention": latent.mla_attention,
    "situ_mul": experts.situ_mul,
    "route": experts.route,
    "run_experts": experts.run_experts,
    "finalize_experts": experts.finalize_experts,
    "latent_tail": experts.latent_tail,
    "linear_add": experts.linear_add,
}
