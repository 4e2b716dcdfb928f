"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692), in plain torch for any device.

Shapes: R rows, n tokens per row, T tokens, H heads, K key and V value channels per head. States are
[H, K, V], keys first. Arithmetic is float32, or float64 for float64 states. Per token

    S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

so a state decays first, then learns the difference between what it recalls and v, then is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interlock.ops.reference import wide

CHUNK = 16
"""Tokens whose influence on each other is solved at once; states exist at its multiples."""
NORM_EPS = 1e-6
# Differences of exponents take chunk * 16 * H * K numbers; this many at most at once.
_PAIRS = 1 << 22


def causal_conv(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of a causal depthwise convolution: (y [R, n, C] wide, history [R, k - 1 + n, C]).

    x [R, n, C]; window [R, k - 1, C] are the inputs before it; weight [C, k], whose last tap meets
    the current token. ``history[:, i : i + k - 1]`` is the window before token i.
    """
    history = torch.cat([window, x], dim=1)
    taps, count = weight.shape[1], x.shape[1]
    values = history.to(weight.dtype)
    y = values[:, :count] * weight[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, values[:, tap : tap + count], weight[:, tap])
    return torch.nn.functional.silu(y), history


def kda_gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """Log decay g [..., H, K] of the inputs z; a_log [H], dt_bias [H, K].

    ``bound * sigmoid(exp(A) (z + b))``, between ``bound`` and 0; ``-exp(A) softplus(z + b)``
    without a bound.
    """
    z = z.to(a_log.dtype) + dt_bias
    rate = a_log.exp()[:, None]
    if bound is None:
        return -rate * torch.nn.functional.softplus(z)
    return bound * torch.sigmoid(rate * z)


def unit(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Token by token: (o [R, n, H, V], the state [R, H, K, V] after each token).

    q (scaled), k, g [R, n, H, K]; v [R, n, H, V]; beta [R, n, H]; state [R, H, K, V], not changed.
    """
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        recalled = (state * k[:, t, ..., None]).sum(-2)
        change = (v[:, t] - recalled) * beta[:, t, :, None]
        state = torch.addcmul(state, k[:, t, ..., None], change[..., None, :])
        outputs.append((state * q[:, t, ..., None]).sum(-2))
        states.append(state)
    return torch.stack(outputs, dim=1), states


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    exports: Sequence[int] = (),
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One row's tokens, 16 at a time: (o [T, H, V], state after T tokens, states at ``exports``).

    q (scaled), k, g [T, H, K]; v [T, H, V]; beta [T, H]; state [H, K, V], not changed; exports are
    multiples of 16 below T. Within a chunk, with G the running sum of g, the tokens' changes solve
    ``(I + A) u = beta (v - e^G k S)``, ``A_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd)``, i > j.
    Exponents are differences, never factors that could overflow: G may fall without a bound.
    """
    count = len(q)
    q, k, v, g = (_chunks(x) for x in (q, k, v, g))
    b = _chunks(beta[..., None])
    total = g.cumsum(2)
    among, scores = _pairwise(q, k, total)
    unitary = torch.eye(CHUNK, dtype=q.dtype, device=q.device) + torch.tril(b * among, -1)
    right = torch.cat([b * v, b * total.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(unitary, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[:, :, -1:]
    reads, writes = q * total.exp(), (k * (last - total).exp()).transpose(-1, -2)
    fades = last.exp().transpose(-1, -2)
    outputs, exported = [], []
    for n in range(len(q)):
        if n * CHUNK in exports:
            exported.append(state)
        fresh = u[n] - w[n] @ state
        outputs.append(reads[n] @ state + scores[n] @ fresh)
        state = state * fades[n] + writes[n] @ fresh
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:count], state, exported


def _chunks(x: Tensor) -> Tensor:
    """[T, H, D] to [N, H, 16, D]; tokens that fill up the last chunk change nothing (all zero)."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % CHUNK))
    chunks: Tensor = padded.unflatten(0, (-1, CHUNK))
    return chunks.transpose(1, 2)


def _pairwise(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Products of tokens i >= j of a chunk with what decays between them: k k^T and q k^T."""
    step = max(1, _PAIRS // (CHUNK * k[0].numel()))
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).triu(1)[..., None]
    among, scores = [], []
    for n in range(0, len(k), step):
        part = total[n : n + step]
        # Masked before exp: a token that is still to come would overflow.
        apart = (part[..., :, None, :] - part[..., None, :, :]).masked_fill(future, -torch.inf)
        weighted = apart.exp() * k[n : n + step, :, None]
        among.append((weighted @ k[n : n + step, ..., None])[..., 0])
        scores.append((weighted @ q[n : n + step, ..., None])[..., 0])
    return torch.cat(among), torch.cat(scores)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``RMSNorm(x) * sigmoid(gate)`` per head: x [T, H, V], gate [T, H V] -> gate's shape, dtype.

    weight [V] is shared by all heads.
    """
    x = x.to(weight.dtype)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(1) * torch.sigmoid(gate.to(weight.dtype))).to(gate.dtype)


def residual_mix(candidates: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Block attention residual: a softmax over n vectors per token; candidates [n, T, D] -> [T, D].

    Scores are ``sum(RMSNorm(x) * norm * weight)``, not scaled; what is mixed is not normalized.
    """
    v = candidates.to(wide(candidates.dtype))
    scores = (v * (norm * weight)).sum(-1) * torch.rsqrt(v.pow(2).mean(-1) + eps)
    return (scores.softmax(0)[..., None] * v).sum(0).to(candidates.dtype)
