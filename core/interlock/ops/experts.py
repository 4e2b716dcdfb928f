"""Mixture of experts: choosing experts for tokens, and running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from interlock.ops.reference import rms_norm, wide

if TYPE_CHECKING:
    from interlock.parallel.group import TensorParallel


def situ_mul(x: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU: ``beta tanh(gate / beta) sigmoid(gate) * bounded(up)`` for x [T, 2F], gate first.

    ``bounded(up)`` is ``linear_beta tanh(up / linear_beta)``, or ``up`` without that bound.
    """
    gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)


def route(
    logits: Tensor,
    bias: Tensor,
    top: int,
    *,
    sigmoid: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights [T, top] and ids [T, top] of the chosen experts for logits [T, E], both wide.

    ``bias`` [E] helps to be chosen and does not enter the weights (DeepSeek-V3, arXiv 2412.19437).
    With groups, only experts of the ``top_groups`` groups whose two best sum highest can be chosen.
    """
    scores = torch.sigmoid(logits) if sigmoid else logits.softmax(-1)
    biased = scores + bias
    if groups > 1:
        biased = _mask_groups(biased, groups, top_groups)
    ids = biased.topk(top, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    # In the order of their ids, in which they are summed as well.
    ids, order = ids.sort(dim=-1)
    return weights.gather(-1, order) * scaling, ids


def _mask_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    grouped: Tensor = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = best.topk(top_groups, dim=-1).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, value=False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


def run_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    beta: float | None,
    linear_beta: float | None,
    block: int | None = None,
) -> Tensor:
    """``sum_k weights_k down(act(gate x, up x))`` of the chosen experts: x [T, D] -> [T, D] wide.

    w13 [E, 2F, D] has gate's rows before up's; w2 [E, D, F]; ``beta`` None is SwiGLU, else SiTU.
    Each token's experts are summed in the order of their ids, whatever the batch (`route` gives
    them so). With ``block``
    an expert's rows go through the kernels so many at a time, the last ones padded: torch picks a
    kernel by shape, and two kernels add in different orders.
    """
    top = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(w13)).tolist()
    tokens = order // top
    hidden = _grouped(x[tokens], w13, counts, block)
    if beta is None:
        gate, up = hidden.to(weights.dtype).chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    else:
        inner = situ_mul(hidden, beta, linear_beta)
    rows = _grouped(inner, w2, counts, block).to(weights.dtype)
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    return out.index_add_(0, tokens, rows * weights.flatten()[order, None])


def finalize_experts(rows: Tensor, weights: Tensor, row_map: Tensor) -> Tensor:
    """Sum of ``weights[t, k] * rows[row_map[t, k]]`` over k, ascending: [T, D] in weights' dtype.

    rows [R, D], weights (wide) and row_map [T, top]; a slot with row -1 counts nothing, and what
    lies in rows that no slot names is never read.
    """
    slots = row_map.flatten()
    (here,) = torch.nonzero(slots >= 0, as_tuple=True)
    taken = rows[slots[here].long()].to(weights.dtype) * weights.flatten()[here, None]
    out = weights.new_zeros(len(row_map), rows.shape[1])
    return out.index_add_(0, here // row_map.shape[1], taken)


def latent_tail(
    rows: Tensor,
    weights: Tensor,
    row_map: Tensor,
    norm: Tensor,
    eps: float,
    tp: TensorParallel,
    *,
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    finalize: Callable[[Tensor, Tensor, Tensor], Tensor] = finalize_experts,
) -> Tensor:
    """RMS norm of what `finalize_experts` gives, summed over the ranks: [T, D].

    The sum is rounded once to the dtype of ``norm`` [D] before, as between two kernels.
    """
    summed = tp.all_reduce(finalize(rows, weights, row_map))
    return rms_norm(summed.to(norm.dtype), norm, eps)


def linear_add(x: Tensor, weight: Tensor, addend: Tensor) -> Tensor:
    """``x @ weight.T + addend``: x [T, D], weight [H, D], addend [T, H]."""
    return linear(x, weight) + addend


def _grouped(x: Tensor, weight: Tensor, counts: list[int], block: int | None) -> Tensor:
    """Rows of ``x``, ``counts[e]`` of them for expert e in turn, each times its expert's weight."""
    parts = zip(x.split(counts), weight, strict=True)
    return torch.cat([_linear(rows, matrix, block) for rows, matrix in parts if len(rows)])


def _linear(x: Tensor, weight: Tensor, block: int | None) -> Tensor:
    if block is None:
        return linear(x, weight)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % block))
    return torch.cat([linear(rows, weight) for rows in padded.split(block)])[: len(x)]
