"""What every kernel computes, in PyTorch: on any device, in any floating-point dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from interlock.ops.experts import finalize_experts, latent_tail, linear_add, situ_mul
from interlock.ops.reference import rms_norm
from interlock.parallel.group import SINGLE
from interlock.weights.packed_fp4 import decode
from interlock.weights.quantization import GROUP

__all__ = [
    "Packed",
    "Routing",
    "dequantize_mxfp8",
    "expert_down",
    "expert_down_mx",
    "expert_gate_up",
    "expert_gate_up_mx",
    "finalize_experts",
    "finalize_norm",
    "linear_add",
    "padded_rows",
    "quantize_mxfp8",
    "reduce_tail",
    "sort_tokens",
]
LARGEST = 448.0
"""Of E4M3."""


@attrs.frozen(eq=False)
class Packed:
    """All experts' matrices of one kind: codes uint8 [E, N, K / 2], scales uint8 [E, N, K / 32]."""

    codes: Tensor
    scales: Tensor

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        return decode(self.codes[expert], self.scales[expert], dtype)


@attrs.frozen(eq=False)
class Routing:
    """Which row of the experts' products belongs to which token.

    Expert e has rows from ``starts[e]`` on, ascending in (token, slot); every expert's first row
    is a multiple of the block, and rows in between are padding.
    """

    row_token: Tensor
    """int32 [rows]: the token of every row, -1 for padding."""
    row_map: Tensor
    """int32 [T, top]: the row of every slot, -1 for a slot without an expert here."""
    starts: Tensor
    """int32 [E + 1]; the last one is where the rows end that count."""


def padded_rows(pairs: int, num_experts: int, block: int) -> int:
    """How many rows are enough whoever is chosen: known without asking the device."""
    most = pairs + min(num_experts, pairs) * (block - 1)
    return -(-most // block) * block


def sort_tokens(ids: Tensor, num_experts: int, block: int) -> Routing:
    flat = ids.flatten().long()
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    ends = ((counts + block - 1) // block * block).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    row_map = torch.full_like(flat, -1)
    row_token = flat.new_full((padded_rows(len(flat), num_experts, block),), -1)
    for expert in range(num_experts):
        (pairs,) = torch.nonzero(flat == expert, as_tuple=True)
        rows = starts[expert] + torch.arange(len(pairs), device=ids.device)
        row_map[pairs], row_token[rows] = rows, pairs // ids.shape[1]
    return Routing(row_token.int(), row_map.int().view(ids.shape), starts.int())


def finalize_norm(
    rows: Tensor, weights: Tensor, row_map: Tensor, norm: Tensor, eps: float
) -> Tensor:
    """RMS norm of finalized rows, rounded to the dtype of ``norm`` before."""
    return latent_tail(rows, weights, row_map, norm, eps, SINGLE)


def reduce_tail(ranks: Sequence[tuple[Tensor, Tensor, Tensor]], norm: Tensor, eps: float) -> Tensor:
    """RMS norm of the ranks' finalized (rows, weights, row_map), added in ascending order."""
    total = finalize_experts(*ranks[0])
    for rank in ranks[1:]:
        total = total + finalize_experts(*rank)
    return rms_norm(total.to(norm.dtype), norm, eps)


def _per_expert(routing: Routing) -> list[tuple[int, slice]]:
    starts = routing.starts.tolist()
    spans = pairwise(starts)
    return [(expert, slice(a, b)) for expert, (a, b) in enumerate(spans) if b > a]


def expert_gate_up(
    x: Tensor, weights: Packed, routing: Routing, beta: float | None, linear_beta: float | None
) -> Tensor:
    """``act(gate x, up x)`` of every row: [rows, F], zero for padding. ``beta`` None is SwiGLU."""
    out = x.new_zeros(len(routing.row_token), weights.codes.shape[1] // 2)
    for expert, rows in _per_expert(routing):
        token = routing.row_token[rows].long()
        tokens = torch.where((token >= 0)[:, None], x[token.clamp_min(0)], x.new_zeros(()))
        hidden = linear(tokens, weights.dense(expert, x.dtype))
        out[rows] = _activate(hidden, beta, linear_beta)
    return out


def _activate(hidden: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    if beta is not None:
        return situ_mul(hidden, beta, linear_beta)
    gate, up = hidden.chunk(2, dim=-1)
    return silu(gate) * up


def expert_down(inner: Tensor, weights: Packed, routing: Routing) -> Tensor:
    """The experts' second product of inner [rows, F]: [rows, D], zero behind the last expert."""
    out = inner.new_zeros(len(inner), weights.codes.shape[1])
    for expert, rows in _per_expert(routing):
        out[rows] = linear(inner[rows], weights.dense(expert, inner.dtype))
    return out


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """X [M, K] to E4M3 [M, K] and E8M0 bytes [M, K / 32] (OCP MX v1.0, section 6.3).

    A group's scale is 2^(floor(log2(largest)) - 8); what exceeds 448 under it saturates. A group
    of zeros has byte 0; one with NaN or infinity has byte 255, which is NaN.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    _, exponent = torch.frexp(largest)
    byte = (exponent - 1 - 8 + 127).clamp(0, 254)
    byte = torch.where(largest == 0, torch.zeros_like(byte), byte)
    scaled = groups * torch.exp2((127 - byte).double()).float()[..., None]
    values = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    byte = torch.where(largest.isfinite(), byte, torch.full_like(byte, 255))
    return values.flatten(-2), byte.to(torch.uint8)


def dequantize_mxfp8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that E4M3 values [M, K] under E8M0 bytes [M, K / 32] stand for."""
    factor = torch.exp2(scales.double() - 127)
    factor = torch.where(scales == 255, torch.full_like(factor, torch.nan), factor)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    groups: Tensor = values.to(kind).unflatten(-1, (-1, GROUP)) * factor.to(kind)[..., None]
    return groups.flatten(-2).to(dtype)


def expert_gate_up_mx(
    x: tuple[Tensor, Tensor],
    weights: Packed,
    routing: Routing,
    beta: float | None,
    linear_beta: float | None,
) -> tuple[Tensor, Tensor]:
    """`expert_gate_up` of tokens in MXFP8, in float32, its result in MXFP8."""
    dense = dequantize_mxfp8(*x, torch.float32)
    return quantize_mxfp8(expert_gate_up(dense, weights, routing, beta, linear_beta))


def expert_down_mx(
    inner: tuple[Tensor, Tensor], weights: Packed, routing: Routing, dtype: torch.dtype
) -> Tensor:
    """`expert_down` of inner values in MXFP8, in float32."""
    return expert_down(dequantize_mxfp8(*inner, torch.float32), weights, routing).to(dtype)
