"""Quantizing activations to MXFP8."""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.kernels.fp4 import mxfp8_scale, mxfp8_value


@triton.jit
def quantize_kernel(x, out, scales, M, K, stride_x, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    keep = (m < M)[:, None] & (k < K)[None, :]
    row = m[:, None].to(tl.int64)
    tile = tl.load(x + row * stride_x + k[None, :], mask=keep, other=0.0).to(tl.float32)
    groups = tl.reshape(tile, (BM, BK // 32, 32))
    byte = mxfp8_scale(groups, 2)
    bits = mxfp8_value(groups, byte[:, :, None]).to(tl.uint8, bitcast=True)
    tl.store(out + row * K + k[None, :], tl.reshape(bits, (BM, BK)), mask=keep)
    group = tl.program_id(1) * (BK // 32) + tl.arange(0, BK // 32)
    keep = (m < M)[:, None] & (group < K // 32)[None, :]
    tl.store(scales + row * (K // 32) + group[None, :], byte, mask=keep)


def quantize_mxfp8(
    x: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """X [M, K] to E4M3 values [M, K] and E8M0 scales [M, K / 32]: see `reference`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape
    if out is None:
        values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
        out = values, torch.empty(rows, size // 32, dtype=torch.uint8, device=x.device)
    if rows:
        block, width = 8, min(512, triton.next_power_of_2(size))
        grid = (triton.cdiv(rows, block), triton.cdiv(size, width))
        quantize_kernel[grid](
            x, out[0].view(torch.uint8), out[1], rows, size, x.stride(0), BM=block, BK=width
        )
    return out
