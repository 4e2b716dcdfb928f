"""The latent tail: what follows the experts' second product.

`finalize_norm` reads the rows that the experts left, weights and sums them in float32 in the order
of the slots, rounds once as an eager sum would, and normalizes: without it the sum is written and
read once more, by a kernel of its own. `linear_add` is the up-projection with the shared experts'
result as its epilogue. Products and sums are not fused into one rounding, so that results are the
reference's.
"""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.tiles import Tiles, for_linear


@triton.jit
def weighted_sum(rows, weights, row_map, token, d, D, TOP: tl.constexpr, BD: tl.constexpr):
    """Float32 sum over a token's slots; a slot without a row is not read."""
    total = tl.zeros((BD,), tl.float32)
    for slot in tl.static_range(TOP):
        row = tl.load(row_map + token * TOP + slot)
        weight = tl.load(weights + token * TOP + slot)
        limit = tl.where(row >= 0, D, 0)
        at = rows + tl.maximum(row, 0).to(tl.int64) * D + d
        value = tl.load(at, mask=d < limit, other=0.0).to(tl.float32)
        total = tl.where(d < limit, total + weight * value, total)
    return total


@triton.jit
def finalize_kernel(rows, weights, row_map, out, D, TOP: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = weighted_sum(rows, weights, row_map, token, d, D, TOP, BD)
    tl.store(out + token * D + d, total, mask=d < D)


@triton.jit
def finalize_norm_kernel(
    rows, weights, row_map, norm, out, D, eps, TOP: tl.constexpr, BD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    total = weighted_sum(rows, weights, row_map, token, d, D, TOP, BD)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + d, (total * scale * weight).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def linear_add_kernel(
    x, weight, addend, out, T, D, H, stride_x,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of ``x @ weight.T + addend``, weights on the M side."""
    t = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    h = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BT), tl.float32)
    for k in range(0, D, BK):
        kk = k + tl.arange(0, BK)
        tokens = tl.load(
            x + t[None, :] * stride_x + kk[:, None],
            mask=(t < T)[None, :] & (kk < D)[:, None], other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight + h[:, None].to(tl.int64) * D + kk[None, :],
            mask=(h < H)[:, None] & (kk < D)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(w, tokens, acc)
    keep = (h < H)[:, None] & (t < T)[None, :]
    at = t[None, :] * H + h[:, None]
    acc += tl.load(addend + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=keep)


def finalize_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_map: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `interlock.ops.experts.finalize_experts`, float32 [T, D]."""
    tokens, top = row_map.shape
    size = rows.shape[1]
    if out is None:
        out = torch.empty(tokens, size, dtype=torch.float32, device=rows.device)
    if tokens:
        width = min(1024, triton.next_power_of_2(size))
        given = (each.contiguous() for each in (rows, weights, row_map))
        finalize_kernel[(tokens, triton.cdiv(size, width))](
            *given, out, size, TOP=top, BD=width,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def finalize_norm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_map: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm of finalized rows, [T, D] in the dtype of ``norm``: see `reference`."""
    tokens, top = row_map.shape
    size = rows.shape[1]
    if out is None:
        out = torch.empty(tokens, size, dtype=norm.dtype, device=rows.device)
    if tokens:
        given = (each.contiguous() for each in (rows, weights, row_map))
        finalize_norm_kernel[(tokens,)](
            *given, norm, out, size, eps,
            TOP=top, BD=triton.next_power_of_2(size), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor,
    tiles: Tiles | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `interlock.ops.experts.linear_add`, rounded once."""
    (tokens, size), outputs = x.shape, len(weight)
    addend = addend.contiguous()
    out = torch.empty_like(addend) if out is None else out
    tiles = tiles or for_linear(tokens, outputs, size)
    if tokens:
        grid = (triton.cdiv(outputs, tiles.outputs), triton.cdiv(tokens, tiles.tokens))
        linear_add_kernel[grid](
            x, weight, addend, out, tokens, size, outputs, x.stride(0),
            BT=tiles.tokens, BN=tiles.outputs, BK=tiles.inputs,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out
