"""Linear layers: a weight in row-wise parts, and the method that stores and multiplies it.

Methods of the core, for a CPU with AVX-512 (and for bf16 AVX512-BF16):

* `PackedDense`: the weight in panels, one kernel for any number of rows.
* `PackedGroups`: GGUF blocks of 4 or 8 bits kept as they are for a few rows, where reading the
  weight is what costs, beside a `PackedDense` copy for many rows, where unpacking would. It takes
  2.6 bytes per weight instead of 2; a decode step of SmolLM2-135M at batch 1 takes two thirds
  of the time.

Elsewhere `Dense` runs torch's linear.

A row's result should not depend on its neighbours. `PackedGroups` therefore goes by the kind of a
row (`RowKinds`), not by how many there are; ``batch_invariant=False`` lets it go by their number,
which is faster for large batches. ``batch_invariant=True`` asks for one kernel for every row, also
where torch's linear runs: `PackedDense`, or `FixedRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from interlock.ops import kernel_problem

if TYPE_CHECKING:
    from interlock.extension import LinearMethod
    from interlock.weights.source import WeightTensor

FEW_ROWS = {"Q4_0": 8, "Q4_1": 8, "Q8_0": 4}
"""Up to how many rows the packed blocks are faster than a bf16 weight; measured on Zen 4."""


class RowKinds:
    """How many leading rows of the step at hand decode or verify; the others prefill.

    The model sets it before each forward pass; all its layers read the same object.
    """

    __slots__ = ("leading",)

    def __init__(self) -> None:
        self.leading = 0


class Linear:
    """``y = x W^T + b``, where W's rows are the concatenation of several tensors (q, k and v).

    ``methods`` is asked once, when the format of the weight is known: keyword arguments name,
    in_features, out_features, weight_format, dtype, device; None leaves the layer to the core.
    ``weight_format`` joins the formats of the parts with "+" if they differ.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_parts: Sequence[int],
        methods: Callable[..., LinearMethod | None],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batch_invariant: bool | None = None,
        kinds: RowKinds | None = None,
    ) -> None:
        self.name = name
        self.in_features, self.out_features = in_features, sum(out_parts)
        self._methods = methods
        self._dtype = dtype
        self._device = device or torch.device("cpu")
        self._batch_invariant = batch_invariant
        self._kinds = kinds
        self.method: LinearMethod

    def load(self, parts: Sequence[WeightTensor], bias: Tensor | None = None) -> None:
        """Choose the method and hand it the weight, row-wise in ``parts``, and the bias [N]."""
        self.method = self._choose("+".join(dict.fromkeys(part.info.format for part in parts)))
        self.method.create_weights(self.in_features, self.out_features)
        self.method.load(parts, bias)

    def _choose(self, weight_format: str) -> LinearMethod:
        asked = self._methods(
            name=self.name,
            in_features=self.in_features,
            out_features=self.out_features,
            weight_format=weight_format,
            dtype=self._dtype,
            device=self._device,
        )
        if asked:
            return asked
        return default_method(
            self.in_features,
            weight_format,
            self._dtype,
            self._device,
            self._batch_invariant,
            self._kinds,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, in_features] to [T, out_features]."""
        return self.method.apply(x)


def default_method(
    in_features: int,
    weight_format: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool | None = None,
    kinds: RowKinds | None = None,
) -> LinearMethod:
    """The core's method for a layer; see the module's text for ``batch_invariant``."""
    if not _packs(in_features, dtype, device):
        return FixedRows(dtype, device) if batch_invariant else Dense(dtype, device)
    if batch_invariant or weight_format not in FEW_ROWS or dtype != torch.bfloat16:
        return PackedDense(dtype)
    from interlock.ops.cpu_linear import grouped_unsupported

    if grouped_unsupported(in_features) is not None:
        return PackedDense(dtype)
    return PackedGroups(weight_format, None if batch_invariant is False else kinds)


def _packs(in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or kernel_problem(dtype) is not None:
        return False
    from interlock.ops.cpu_linear import dense_unsupported

    return dense_unsupported(dtype, in_features) is None


def _join(parts: Sequence[WeightTensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.dense(dtype) for part in parts])


class Dense:
    """torch's linear, on any device and dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._bias: Tensor | None = None

    def create_weights(self, in_features: int, out_features: int) -> None:
        shape = (out_features, in_features)
        self.weight = torch.empty(shape, dtype=self._dtype, device=self._device)

    def load(self, parts: Sequence[Any], bias: Tensor | None) -> None:
        start = 0
        for part in parts:
            rows = part.dense(self._dtype)
            self.weight[start : start + len(rows)] = rows
            start += len(rows)
        self._bias = None if bias is None else bias.to(self.weight)

    def apply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self._bias)


class FixedRows(Dense):
    """torch's linear in blocks of 16 rows, the last one padded.

    torch picks its matrix kernel by shape, and two kernels add in different orders; with one
    shape only, a row has the same bits in every batch.
    """

    ROWS = 16

    def apply(self, x: Tensor) -> Tensor:
        count = len(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, -count % self.ROWS))
        blocks = [
            linear(block, self.weight, self._bias) for block in torch.split(padded, self.ROWS)
        ]
        return torch.cat(blocks)[:count] if blocks else x.new_empty(0, len(self.weight))


class PackedDense:
    """A bf16 or float32 weight in panels (`interlock.ops.cpu_linear`), for any number of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        from interlock.ops import cpu_linear

        self._kernels = cpu_linear
        self._dtype = dtype
        self._bias: Tensor | None = None
        cpu_linear.dense_kernel(dtype)

    def create_weights(self, in_features: int, out_features: int) -> None:  # noqa: ARG002
        self._columns = out_features

    def load(self, parts: Sequence[Any], bias: Tensor | None) -> None:
        self._weight = self._kernels.pack_dense(_join(parts, self._dtype))
        self._bias = None if bias is None else self._kernels.pack_bias(bias)

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._kernels.dense(x, self._weight, self._columns, self._bias, out)


class PackedGroups:
    """GGUF blocks (Q4_0, Q4_1, Q8_0), multiplied exactly for a few rows, as bf16 for many.

    With ``kinds`` "few" are the rows that decode or verify; without, any up to `FEW_ROWS`.
    A block's 32 weights are ``scale * q + minimum``. Scales and minima stay the file's float16
    and sums are float32, so that results differ from the float64 product by the rounding of the
    result only; the bf16 copy rounds every weight once more (relative 2^-9), as bf16 models do.
    """

    def __init__(self, weight_format: str, kinds: RowKinds | None = None) -> None:
        from interlock.ops import cpu_linear

        self._kernels = cpu_linear
        self._format = weight_format
        self._kinds = kinds
        self._few = FEW_ROWS[weight_format]
        self._many = PackedDense(torch.bfloat16)
        self._tables = cpu_linear.value_tables(_TABLES[weight_format])
        cpu_linear.grouped_kernel(len(self._tables))

    def create_weights(self, in_features: int, out_features: int) -> None:
        self._columns = out_features
        self._many.create_weights(in_features, out_features)

    def load(self, parts: Sequence[Any], bias: Tensor | None) -> None:
        self._many.load(parts, bias)
        self._bias = None if bias is None else self._kernels.pack_bias(bias)
        blocks = torch.cat([part.blocks() for part in parts])
        planes, scale, minimum = split_blocks(blocks, self._format)
        self._weight = self._kernels.pack_groups(planes, scale, minimum)
        if not minimum.isfinite().all():
            # -8 * scale left float16's range; nothing but the dense copy can say such weights.
            self._few, self._kinds = 0, None

    def apply(self, x: Tensor) -> Tensor:
        few = self._leading(len(x))
        if few == 0:
            return self._many.apply(x)
        if few == len(x):
            return self._exact(x)
        out = x.new_empty(len(x), self._columns)
        self._exact(x[:few], out[:few])
        self._many.apply(x[few:], out[few:])
        return out

    def _leading(self, rows: int) -> int:
        """How many leading rows of ``rows`` are multiplied exactly."""
        if self._kinds is not None:
            return min(self._kinds.leading, rows)
        return rows if rows <= self._few else 0

    def _exact(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._kernels.grouped(x, self._weight, self._tables, self._columns, self._bias, out)


_TABLES: dict[str, list[range]] = {
    "Q4_0": [range(16)],
    "Q4_1": [range(16)],
    "Q8_0": [range(16), range(-128, 128, 16)],
}


def split_blocks(blocks: Tensor, weight_format: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """GGUF blocks uint8 [N, bytes] to planes (uint8 [N, K], 0 to 15), scale and minimum [N, K/32].

    Block layouts are GGML's: a float16 scale (Q4_1: and minimum), then 16 bytes whose low
    nibbles are inputs 0 to 15 and high nibbles 16 to 31 (Q8_0: 32 signed bytes).
    """
    header = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}[weight_format]
    size = header + (32 if weight_format == "Q8_0" else 16)
    split = blocks.view(len(blocks), -1, size)
    numbers = split[..., :header].contiguous().view(torch.float16)
    scale, body = numbers[..., 0], split[..., header:]
    low, high = body & 15, body >> 4
    if weight_format == "Q8_0":
        # As two's complement q = 16 * high + low, with high from -8 to 7 stored as 0 to 15.
        return [low.flatten(1), (high ^ 8).flatten(1)], scale, torch.zeros_like(scale)
    minimum = numbers[..., 1] if weight_format == "Q4_1" else scale * -8
    return [torch.cat([low, high], dim=-1).flatten(1)], scale, minimum
