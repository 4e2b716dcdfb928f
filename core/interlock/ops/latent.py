"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents.

A token keeps one vector for all heads, ``[c | k_pe]``: a compressed latent, from which every head's
keys and values are projected, and a part that is key for all heads as it is. Prefill rows expand
the latents of their context to keys and values once (the plain form). Decode and verify rows move
the projection into the query instead (the absorbed form), so that they read the latents only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interlock.ops.reference import attend, gather, wide


def latent_store(latent: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents [T, L] to the cache [blocks, block_size, L]; slot -1 writes nothing."""
    keep = slot_mapping >= 0
    cache.view(-1, cache.shape[-1])[slot_mapping[keep]] = latent[keep]


def mla_attention(
    q: Tensor, cache: Tensor, k_up: Tensor, v_up: Tensor, batch: Any, scale: float
) -> Tensor:
    """Causal attention of every row over its own context -> [T, H V].

    q [T, H, N + P], of which N meet projected keys and P the shared part; cache
    [blocks, block_size, C + P]; k_up [H, N, C]; v_up [H, V, C].
    """
    out = q.new_zeros(len(q), len(v_up) * v_up.shape[1])
    start = 0
    for row, (count, context) in enumerate(zip(batch.query_lens, batch.context, strict=True)):
        latents = gather(cache, batch.tables[row], context)
        form = plain if row >= batch.prefill.rows.start else absorbed
        rows = slice(start, start + count)
        out[rows] = form(q[rows], latents, k_up, v_up, scale).flatten(1)
        start += count
    return out


def plain(q: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, scale: float) -> Tensor:
    """One row with its context's keys and values spelled out: q [n, H, N + P] -> [n, H, V]."""
    c, k_pe = latents.split([k_up.shape[-1], latents.shape[-1] - k_up.shape[-1]], dim=-1)
    nope = torch.einsum("tc,hnc->thn", c, k_up)
    keys = torch.cat([nope, k_pe[:, None].expand(-1, len(k_up), -1)], dim=-1)
    values = torch.einsum("tc,hvc->thv", c, v_up)
    return attend(q, keys, values, scale)


def absorbed(q: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, scale: float) -> Tensor:
    """The same without expanding the context: q [n, H, N + P] -> [n, H, V]."""
    kind = wide(q.dtype)
    nope, rank = k_up.shape[1:]
    moved = torch.einsum("thn,hnc->thc", q[..., :nope].to(kind), k_up.to(kind))
    stored = latents.to(kind)
    scores = torch.cat([moved, q[..., nope:].to(kind)], dim=-1) @ stored.T * scale
    if len(q) > 1:
        last = torch.arange(len(latents) - len(q), len(latents), device=q.device)
        future = torch.arange(len(latents), device=q.device) > last[:, None, None]
        scores = scores.masked_fill(future, -torch.inf)
    mixed = scores.softmax(-1) @ stored[:, :rank]
    return torch.einsum("thc,hvc->thv", mixed, v_up.to(kind)).to(q.dtype)
