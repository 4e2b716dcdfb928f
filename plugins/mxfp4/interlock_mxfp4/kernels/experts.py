"""Products of tokens with their experts' MXFP4 weights, activations as they are (W4A16).

Weights are on the M side of the matrix instruction and tokens on the N side: Blackwell's takes 64
or 128 rows of the one and from 8 of the other, and an expert of a decode batch has a few tokens.
"""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.kernels.fp4 import gated, unpack_tile, weight_codes
from interlock_mxfp4.kernels.reference import Packed, Routing
from interlock_mxfp4.tiles import Tiles


@triton.jit
def expert_of(starts, first, E, BINS: tl.constexpr):
    """The expert whose rows ``first`` is among: the last that begins there or before."""
    e = tl.arange(0, BINS)
    start = tl.load(starts + e, mask=e < E, other=2147483647)
    return tl.sum((start <= first).to(tl.int32), 0) - 1


@triton.jit
def weight_tile(
    codes, scales, row, keep, k, K, ROWS: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr
):
    """Values [ROWS, BK] of weight rows ``row`` at inputs from ``k`` on; zero beyond K."""
    q, s = weight_codes(codes, scales, row, keep, k, K, BK)
    return unpack_tile(q, s, ROWS, BK, DTYPE)


@triton.jit
def gate_up_kernel(
    x, codes, scales, row_token, starts, out, D, F, E, stride_x, beta, linear_beta,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BINS: tl.constexpr,
    SITU: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One tile of rows by BN gate and the same BN up outputs, activated in registers."""
    first = tl.program_id(1) * BT
    if first < tl.load(starts + E):
        expert = expert_of(starts, first, E, BINS).to(tl.int64)
        rows = first + tl.arange(0, BT)
        token = tl.load(row_token + rows)
        f = tl.program_id(0) * BN + tl.arange(0, BN)
        gate_row = expert * 2 * F + f
        gate = tl.zeros((BN, BT), tl.float32)
        up = tl.zeros((BN, BT), tl.float32)
        for k in range(0, D, BK):
            kk = k + tl.arange(0, BK)
            tokens = tl.load(
                x + token[None, :].to(tl.int64) * stride_x + kk[:, None],
                mask=(token >= 0)[None, :] & (kk < D)[:, None], other=0.0,
            )  # fmt: skip
            w = weight_tile(codes, scales, gate_row, f < F, k, D, BN, BK, tokens.dtype)
            gate = tl.dot(w, tokens, gate)
            w = weight_tile(codes, scales, gate_row + F, f < F, k, D, BN, BK, tokens.dtype)
            up = tl.dot(w, tokens, up)
        inner = gated(gate, up, beta, linear_beta, SITU, BOUNDED)
        at = out + rows[None, :].to(tl.int64) * F + f[:, None]
        tl.store(at, inner.to(out.dtype.element_ty), mask=(f < F)[:, None])


@triton.jit
def down_kernel(
    inner, codes, scales, starts, out, F, D, E,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One tile of rows by BN outputs."""
    first = tl.program_id(1) * BT
    if first < tl.load(starts + E):
        expert = expert_of(starts, first, E, BINS).to(tl.int64)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        d = tl.program_id(0) * BN + tl.arange(0, BN)
        weight_row = expert * D + d
        acc = tl.zeros((BN, BT), tl.float32)
        for k in range(0, F, BK):
            kk = k + tl.arange(0, BK)
            tokens = tl.load(
                inner + rows[None, :] * F + kk[:, None], mask=(kk < F)[:, None], other=0.0
            )
            w = weight_tile(codes, scales, weight_row, d < D, k, F, BN, BK, tokens.dtype)
            acc = tl.dot(w, tokens, acc)
        tl.store(
            out + rows[None, :] * D + d[:, None], acc.to(out.dtype.element_ty),
            mask=(d < D)[:, None],
        )  # fmt: skip


def expert_gate_up(
    x: torch.Tensor,
    weights: Packed,
    routing: Routing,
    tiles: Tiles,
    beta: float | None,
    linear_beta: float | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Activated inner values [rows, F] of x [T, D]: see `reference.expert_gate_up`.

    Padding rows inside an expert's last tile become zero; rows behind the last tile are not
    written. ``tiles.tokens`` is the block that ``routing`` was made with.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    size, inner = x.shape[1], weights.codes.shape[1] // 2
    rows = len(routing.row_token)
    out = x.new_empty(rows, inner) if out is None else out
    experts = len(weights.codes)
    grid = (triton.cdiv(inner, tiles.outputs), rows // tiles.tokens)
    gate_up_kernel[grid](
        x, weights.codes, weights.scales, routing.row_token, routing.starts, out,
        size, inner, experts, x.stride(0), beta or 1.0, linear_beta or 1.0,
        BT=tiles.tokens, BN=tiles.outputs, BK=tiles.inputs,
        BINS=triton.next_power_of_2(experts), SITU=beta is not None,
        BOUNDED=linear_beta is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def expert_down(
    inner: torch.Tensor,
    weights: Packed,
    routing: Routing,
    tiles: Tiles,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [rows, D] of inner [rows, F]: see `reference.expert_down`."""
    experts, size = weights.codes.shape[:2]
    inner, rows = inner.contiguous(), len(inner)
    out = inner.new_empty(rows, size) if out is None else out
    grid = (triton.cdiv(size, tiles.outputs), rows // tiles.tokens)
    down_kernel[grid](
        inner, weights.codes, weights.scales, routing.starts, out,
        inner.shape[1], size, experts,
        BT=tiles.tokens, BN=tiles.outputs, BK=tiles.inputs,
        BINS=triton.next_power_of_2(experts), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
