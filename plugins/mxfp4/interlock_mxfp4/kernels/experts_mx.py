"""The same products with MXFP8 activations (W4A8), by the block-scaled matrix instruction.

Both operands come with their E8M0 scales, so that `tl.dot_scaled` becomes one tcgen05.mma of kind
mxf8f6f4 with block_scale; without a scale on one side Triton would unpack the weights in software.
"""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.kernels.experts import expert_of
from interlock_mxfp4.kernels.fp4 import gated, mxfp8_scale, mxfp8_value, weight_codes
from interlock_mxfp4.kernels.reference import Packed, Routing
from interlock_mxfp4.tiles import Tiles


@triton.jit
def token_scales(xs, row, keep, k, K, BK: tl.constexpr, POLICY: tl.constexpr):
    """Scales [BT, BK / 32] of tokens; one beyond K."""
    group = k // 32 + tl.arange(0, BK // 32)
    return tl.load(
        xs + row[:, None] * (K // 32) + group[None, :],
        mask=keep[:, None] & (group < K // 32)[None, :], other=127, eviction_policy=POLICY,
    )  # fmt: skip


@triton.jit
def token_codes(x, xs, row, keep, k, K, BK: tl.constexpr):
    """Tokens [BK, BT] in E4M3 and their scales [BT, BK / 32]; zero beyond K."""
    kk = k + tl.arange(0, BK)
    bits = tl.load(
        x + row[None, :] * K + kk[:, None], mask=keep[None, :] & (kk < K)[:, None], other=0
    )
    return bits.to(tl.float8e4nv, bitcast=True), token_scales(xs, row, keep, k, K, BK, "")


@triton.jit
def gate_up_mx_kernel(
    x, xs, codes, scales, row_token, starts, out, outs, D, F, E, beta, linear_beta,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BINS: tl.constexpr,
    SITU: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One tile of rows by BN gate and the same BN up outputs, activated and quantized."""
    first = tl.program_id(1) * BT
    if first < tl.load(starts + E):
        expert = expert_of(starts, first, E, BINS).to(tl.int64)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        token = tl.load(row_token + rows).to(tl.int64)
        f = tl.program_id(0) * BN + tl.arange(0, BN)
        gate_row = expert * 2 * F + f
        gate = tl.zeros((BN, BT), tl.float32)
        up = tl.zeros((BN, BT), tl.float32)
        for k in range(0, D, BK):
            t, ts = token_codes(x, xs, token, token >= 0, k, D, BK)
            q, s = weight_codes(codes, scales, gate_row, f < F, k, D, BK)
            gate = tl.dot_scaled(q, s, "e2m1", t, ts, "e4m3", gate)
            q, s = weight_codes(codes, scales, gate_row + F, f < F, k, D, BK)
            # Triton 3.6 cannot compile two products that share one tensor of scales; a load with
            # another eviction policy is not merged with the first.
            ts = token_scales(xs, token, token >= 0, k, D, BK, "evict_last")
            up = tl.dot_scaled(q, s, "e2m1", t, ts, "e4m3", up)
        inner = tl.reshape(gated(gate, up, beta, linear_beta, SITU, BOUNDED), (BN // 32, 32, BT))
        byte = mxfp8_scale(inner, 1)
        bits = mxfp8_value(inner, byte[:, None, :]).to(tl.uint8, bitcast=True)
        at = out + rows[None, :] * F + f[:, None]
        tl.store(at, tl.reshape(bits, (BN, BT)), mask=(f < F)[:, None])
        group = tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
        at = outs + rows[None, :] * (F // 32) + group[:, None]
        tl.store(at, byte, mask=(group < F // 32)[:, None])


@triton.jit
def down_mx_kernel(
    inner, inners, codes, scales, starts, out, F, D, E,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One tile of rows by BN outputs."""
    first = tl.program_id(1) * BT
    if first < tl.load(starts + E):
        expert = expert_of(starts, first, E, BINS).to(tl.int64)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        d = tl.program_id(0) * BN + tl.arange(0, BN)
        acc = tl.zeros((BN, BT), tl.float32)
        for k in range(0, F, BK):
            t, ts = token_codes(inner, inners, rows, rows >= 0, k, F, BK)
            q, s = weight_codes(codes, scales, expert * D + d, d < D, k, F, BK)
            acc = tl.dot_scaled(q, s, "e2m1", t, ts, "e4m3", acc)
        tl.store(
            out + rows[None, :] * D + d[:, None], acc.to(out.dtype.element_ty),
            mask=(d < D)[:, None],
        )  # fmt: skip


def expert_gate_up_mx(
    x: tuple[torch.Tensor, torch.Tensor],
    weights: Packed,
    routing: Routing,
    tiles: Tiles,
    beta: float | None,
    linear_beta: float | None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activated inner values in MXFP8, from tokens in MXFP8: see `reference.expert_gate_up_mx`."""
    values, scales = x
    size, inner = values.shape[1], weights.codes.shape[1] // 2
    rows = len(routing.row_token)
    if out is None:
        out = values.new_empty(rows, inner), scales.new_empty(rows, inner // 32)
    experts = len(weights.codes)
    grid = (triton.cdiv(inner, tiles.outputs), rows // tiles.tokens)
    gate_up_mx_kernel[grid](
        values.view(torch.uint8), scales, weights.codes, weights.scales, routing.row_token,
        routing.starts, out[0].view(torch.uint8), out[1], size, inner, experts, beta or 1.0,
        linear_beta or 1.0, BT=tiles.tokens, BN=tiles.outputs, BK=tiles.inputs,
        BINS=triton.next_power_of_2(experts), SITU=beta is not None,
        BOUNDED=linear_beta is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def expert_down_mx(
    inner: tuple[torch.Tensor, torch.Tensor],
    weights: Packed,
    routing: Routing,
    tiles: Tiles,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [rows, D] of inner values in MXFP8: see `reference.expert_down_mx`."""
    values, scales = inner
    experts, size = weights.codes.shape[:2]
    rows = len(values)
    if out is None:
        out = torch.empty(rows, size, dtype=dtype, device=values.device)
    grid = (triton.cdiv(size, tiles.outputs), rows // tiles.tokens)
    down_mx_kernel[grid](
        values.view(torch.uint8), scales, weights.codes, weights.scales, routing.starts, out,
        values.shape[1], size, experts, BT=tiles.tokens, BN=tiles.outputs, BK=tiles.inputs,
        BINS=triton.next_power_of_2(experts), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
