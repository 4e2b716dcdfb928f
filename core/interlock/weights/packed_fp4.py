"""MXFP4 weights: OCP Microscaling (MX) formats v1.0, E2M1 elements under E8M0 scales.

An element is a sign and E2M1; 32 consecutive inputs share a power of two. In the canonical layout
(compressed-tensors' ``mxfp4-pack-quantized``) byte j of a row holds element 2j in its low nibble
and 2j + 1 in its high one. Every dequantized value from 2^-126 up is exact in bfloat16; what
leaves the range of the wanted dtype becomes infinite, as in any conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from interlock.errors import WeightsError
from interlock.weights.quantization import GROUP
from interlock.weights.source import TensorInfo, WeightTensor

FORMAT: Final = "MXFP4"
"""`TensorInfo.format` of a weight that is stored so, whatever its container."""
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS: Final = 127
SCALE_NAN: Final = 255


class PackedTensor(WeightTensor):
    """A weight that lies in two tensors: codes and scales."""

    def __init__(
        self, info: TensorInfo, names: tuple[str, str], read: Callable[[str], Tensor]
    ) -> None:
        super().__init__(info)
        self._names, self._read = names, read

    def packed(self) -> tuple[Tensor, Tensor]:
        codes, scale = (self._read(name) for name in self._names)
        columns = self.info.shape[-1]
        codes, scale = codes.reshape(-1, columns // 2), scale.reshape(-1, columns // GROUP)
        check_packed(codes, scale, *self._names)
        return codes, scale

    def dense(self, dtype: torch.dtype) -> Tensor:
        return decode(*self.packed(), dtype).reshape(self.info.shape)


def check_packed(codes: Tensor, scale: Tensor, codes_name: str, scale_name: str) -> None:
    """Raise `WeightsError` naming the tensor for shapes that do not fit and NaN scales."""
    if codes.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise WeightsError(f"{codes_name}: packed weights and their scales must be U8")
    if codes.shape[0] != scale.shape[0] or codes.shape[1] * 2 != scale.shape[1] * GROUP:
        raise WeightsError(
            f"{codes_name} {list(codes.shape)} does not fit {scale_name} {list(scale.shape)}: "
            f"a scale belongs to {GROUP} inputs, a byte to 2"
        )
    if bool((scale == SCALE_NAN).any()):
        raise WeightsError(f"{scale_name}: a scale is NaN (0xFF)")


def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """``codes`` uint8 [N, K / 2] and ``scale`` uint8 [N, K / 32] to values [N, K].

    Raises `WeightsError` naming the tensor for shapes that do not fit and scales that are NaN.
    """
    check_packed(codes, scale, f"{name}_packed", f"{name}_scale")
    return decode(codes, scale, dtype)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As `unpack`, of tensors that have been checked."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = _pairs(kind, codes.device)[codes.long()]
    factors = _factors(kind, codes.device)[scale.long()]
    values: Tensor = pairs.view(len(codes), -1, GROUP) * factors[..., None]
    return values.flatten(1).to(dtype)


def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two elements of every byte, [256, 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=-1)


def _factors(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a scale byte multiplies by, [256]; powers of two, subnormal ones too, are exact."""
    exponents = torch.arange(256, dtype=torch.float64, device=device) - SCALE_BIAS
    return torch.exp2(exponents).to(dtype)


def pack(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] to (codes, scale): the nearest values, ties to even, under each scale.

    Of the smallest scale that clips nothing and the one below it, a group takes the one with the
    smaller squared error. Raises `WeightsError` for K that is no multiple of 32, and for numbers
    that are not finite.
    """
    if weight.shape[-1] % GROUP:
        raise WeightsError(
            f"{name}: {weight.shape[-1]} inputs are no multiple of {GROUP}, which share a scale"
        )
    if not bool(weight.isfinite().all()):
        raise WeightsError(f"{name}: a weight is NaN or infinite, which has no code")
    groups = weight.to(torch.float64).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    exponent = torch.ceil(torch.log2(largest / E2M1[-1])).clamp(-SCALE_BIAS, SCALE_BIAS)
    codes, error = _encode(groups, exponent)
    lower = (exponent - 1).clamp_min(-SCALE_BIAS)
    finer, finer_error = _encode(groups, lower)
    better = finer_error < error
    codes = torch.where(better[..., None], finer, codes).flatten(1)
    scale = (torch.where(better, lower, exponent) + SCALE_BIAS).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale


def _encode(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 of ``groups`` [N, G, 32] under 2^exponent [N, G], and the squared errors."""
    scaled = groups / torch.exp2(exponent)[..., None]
    size = scaled.abs()
    table = groups.new_tensor(E2M1)
    middles = (table[1:] + table[:-1]) / 2
    below = torch.bucketize(size, middles)
    # On a middle `below` is the lower neighbour; an odd code gives way to the even one above it.
    tie = torch.bucketize(size, middles, right=True) != below
    index = below + (tie & (below % 2 == 1)).to(below.dtype)
    error = ((table[index] - size) ** 2).sum(-1) * torch.exp2(2 * exponent)
    return (index + 8 * (groups < 0)).to(torch.uint8), error
