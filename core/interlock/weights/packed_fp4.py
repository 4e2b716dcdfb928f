"""Packed FP4 weights as compressed-tensors writes them (``mxfp4-pack-quantized``).

OCP Microscaling (MX) formats v1.0: an element is a sign and E2M1, 32 consecutive inputs share a
power of two (E8M0). Byte j of a row holds element 2j in its low nibble and 2j + 1 in its high one.
Every dequantized value is exact in bfloat16.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from interlock.errors import WeightsError

GROUP: Final = 32
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS: Final = 127
SCALE_NAN: Final = 255


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """``packed`` uint8 [N, K / 2] and ``scale`` uint8 [N, K / 32] to values [N, K].

    Raises `WeightsError` naming the tensor for shapes that do not fit and scales that are NaN.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise WeightsError(f"{name}: packed weights and their scales must be U8")
    if packed.shape[0] != scale.shape[0] or packed.shape[1] * 2 != scale.shape[1] * GROUP:
        raise WeightsError(
            f"{name}: weight_packed {list(packed.shape)} does not fit weight_scale "
            f"{list(scale.shape)}"
        )
    if bool((scale == SCALE_NAN).any()):
        raise WeightsError(f"{name}.weight_scale: a scale is NaN (0xFF)")
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    factors = torch.exp2(scale.to(torch.float64) - SCALE_BIAS)
    values: Tensor = table[codes.long()].unflatten(1, (-1, GROUP)) * factors[..., None]
    return values.flatten(1).to(dtype)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] to (packed, scale): the nearest values under the smallest scale that fits.

    No element of a group exceeds 6 in units of its scale, so nothing is clipped.
    """
    groups = weight.to(torch.float64).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    exponent = torch.ceil(torch.log2(largest / E2M1[-1])).clamp(-SCALE_BIAS, SCALE_BIAS)
    scaled = groups / torch.exp2(exponent)[..., None]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    codes = torch.bucketize(scaled.abs(), middles.to(torch.float64)).to(torch.uint8)
    codes = (codes + 8 * (scaled < 0).to(torch.uint8)).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent + SCALE_BIAS).to(torch.uint8)
