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
    out = q.new_zeros(len(q), len(v_up), v_up.shape[1])
    few = batch.decode.tokens.stop
    if few:
        _absorbed(q[:few], cache, k_up, v_up, batch, scale, out[:few])
    for row in range(*batch.prefill.rows):
        rows = slice(batch.starts[row], batch.starts[row + 1])
        latents = gather(cache, batch.tables[row], batch.context[row])
        out[rows] = plain(q[rows], latents, k_up, v_up, scale)
    return out.flatten(1)


def plain(q: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, scale: float) -> Tensor:
    """One row with its context's keys and values spelled out: q [n, H, N + P] -> [n, H, V]."""
    c, k_pe = latents.split([k_up.shape[-1], latents.shape[-1] - k_up.shape[-1]], dim=-1)
    nope = torch.einsum("tc,hnc->thn", c, k_up)
    keys = torch.cat([nope, k_pe[:, None].expand(-1, len(k_up), -1)], dim=-1)
    values = torch.einsum("tc,hvc->thv", c, v_up)
    return attend(q, keys, values, scale)


def _absorbed(
    q: Tensor, cache: Tensor, k_up: Tensor, v_up: Tensor, batch: Any, scale: float, out: Tensor
) -> None:
    """Rows of few tokens: projections for all of them at once, the contexts one by one."""
    kind, nope = wide(q.dtype), k_up.shape[1]
    moved = torch.einsum("thn,hnc->thc", q[..., :nope].to(kind), k_up.to(kind))
    queries = torch.cat([moved, q[..., nope:].to(kind)], dim=-1) * scale
    mixed = torch.empty_like(moved)
    for row in range(batch.decode.rows.stop):
        rows = slice(batch.starts[row], batch.starts[row + 1])
        latents = gather(cache, batch.tables[row], batch.context[row]).to(kind)
        mixed[rows] = absorbed(queries[rows], latents, k_up.shape[-1])
    out.copy_(torch.einsum("thc,hvc->thv", mixed, v_up.to(kind)))


def absorbed(queries: Tensor, latents: Tensor, rank: int) -> Tensor:
    """One row that does not expand its context: scaled queries [n, H, C + P] -> [n, H, C]."""
    scores = queries @ latents.T
    if len(queries) > 1:
        last = torch.arange(len(latents) - len(queries), len(latents), device=queries.device)
        future = torch.arange(len(latents), device=queries.device) > last[:, None, None]
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ latents[:, :rank]
