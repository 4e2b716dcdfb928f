"""Routed experts whose weights stay packed, and whose results may be left unfinalized."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from interlock.extension import ExpertLayer, UnfinalizedExperts
from interlock.ops.experts import finalize_experts, situ_mul
from interlock.ops.reference import wide
from interlock.weights.packed_fp4 import decode
from interlock.weights.quantization import GROUP
from interlock.weights.source import WeightTensor
from interlock_mxfp4.layers import Counts, Loss, packed_of
from interlock_mxfp4.settings import Mxfp4Settings


def defers(settings: Mxfp4Settings, layer: ExpertLayer, num_tokens: int) -> bool:
    """Whether a batch's rows are left to the consumer; known before the batch is computed.

    It asks what was chosen and what the consumer said when the layer was built, never a loaded
    object: a check of an object that does not exist yet has switched this off unnoticed elsewhere
    (vLLM PR 53327).
    """
    return settings.finalize == "deferred" and num_tokens <= layer.unfinalized_capacity


class PackedExperts:
    """Satisfies `interlock.extension.ExpertMethod`; a backend runs the two products.

    A rank's inner dimension is padded with zeros to whole groups: gate and up of zero are zero
    after the activation, and zero weights take nothing from them.
    """

    def __init__(
        self, layer: ExpertLayer, settings: Mxfp4Settings, path: str, counts: Counts
    ) -> None:
        self._layer, self._settings, self._counts = layer, settings, counts
        self._backend = _backend(layer, settings, path)

    def load(self, matrix: Callable[[int, str], WeightTensor]) -> None:
        layer = self._layer
        inner = -(-layer.inner // GROUP) * GROUP
        loss = Loss(layer.name)
        for expert in range(layer.num_experts):
            parts = {part: packed_of(matrix(expert, part), loss) for part in ("w1", "w3", "w2")}
            gate_up = [_with_rows(parts[part], inner) for part in ("w1", "w3")]
            codes, scale = (torch.cat(pair) for pair in zip(*gate_up, strict=True))
            self._counts.packed_bytes += codes.nbytes + scale.nbytes
            self._counts.packed_bytes += sum(tensor.nbytes for tensor in parts["w2"])
            self._backend.put(expert, (codes, scale), parts["w2"])
        loss.say()

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | UnfinalizedExperts:
        self._counts.calls += 1
        deferred = defers(self._settings, self._layer, len(x))
        rows, row_map = self._backend.run(x, ids)
        if deferred:
            self._counts.deferred += 1
            return UnfinalizedExperts(rows, weights, row_map)
        self._counts.eager += 1
        return self._backend.finalize(rows, weights, row_map)


def _with_rows(packed: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Codes of 0 below; their scale does not matter."""
    missing = rows - len(packed[0])
    if not missing:
        return packed
    codes, scale = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in packed)
    return codes, scale


def _backend(layer: ExpertLayer, settings: Mxfp4Settings, path: str) -> Backend:
    if path == "triton":
        from interlock_mxfp4.gpu import TritonExperts

        return TritonExperts(layer, settings.activations)
    kind = CPUExperts if path == "cpu" else TorchExperts
    return kind(layer, settings.activations)


class Backend:
    """Stores the packed experts and runs tokens through those that they are sent to."""

    def __init__(self, layer: ExpertLayer, activations: str) -> None:
        self.layer, self.mxfp8 = layer, activations == "mxfp8"
        self.inner = -(-layer.inner // GROUP) * GROUP

    def put(self, expert: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
        """Take one expert's codes and scales: [2 inner, size] and [size, inner]."""
        raise NotImplementedError

    def run(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [R, size] of all slots in some order, and row_map [T, top] int32."""
        raise NotImplementedError

    def finalize(self, rows: Tensor, weights: Tensor, row_map: Tensor) -> Tensor:
        return finalize_experts(rows, weights, row_map)

    def activate(self, hidden: Tensor) -> Tensor:
        """Gate [R, F] beside up [R, F] to [R, F], in float32 arithmetic or wider."""
        if self.layer.activation[0] == "situ":
            return situ_mul(hidden, *self.layer.activation[1:])
        gate, up = hidden.to(wide(hidden.dtype)).chunk(2, dim=-1)
        return (silu(gate) * up).to(hidden.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """What MXFP8 leaves of activations; every value of it is exact in bf16."""
        if not self.mxfp8:
            return x
        from interlock_mxfp4.kernels.reference import dequantize_mxfp8, quantize_mxfp8

        return dequantize_mxfp8(*quantize_mxfp8(x), x.dtype)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int], Tensor]:
    """Slots grouped by expert, ascending: their tokens [R], rows per expert, row_map [T, top].

    A slot with id -1 (not on this rank, or padding) has no row.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    counts = flat[order].bincount(minlength=num_experts).tolist()
    row_map = torch.full(flat.shape, -1, dtype=torch.int32, device=ids.device)
    row_map[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    return order // ids.shape[1], counts, row_map.view(ids.shape)


class CPUExperts(Backend):
    """All experts' rows in two calls of the packed kernel."""

    def __init__(self, layer: ExpertLayer, activations: str) -> None:
        super().__init__(layer, activations)
        from interlock_mxfp4 import cpu

        cpu.product_kernel(layer.dtype)
        self._kernels = cpu
        self._gate_up: Tensor | None = None
        self._down: Tensor | None = None

    def put(self, expert: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
        first, second = (self._kernels.pack_panels(*pair) for pair in (gate_up, down))
        if self._gate_up is None or self._down is None:
            count = self.layer.num_experts
            self._gate_up = first.new_empty(count, *first.shape)
            self._down = second.new_empty(count, *second.shape)
        self._gate_up[expert], self._down[expert] = first, second

    def run(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self._gate_up is not None, "loaded before it runs"
        assert self._down is not None
        tokens, counts, row_map = sort_by_expert(ids, self.layer.num_experts)
        segments = self._segments(counts)
        product = self._kernels.product
        hidden = product(self.rounded(x)[tokens], self._gate_up, segments, 2 * self.inner)
        inner = self.rounded(self.activate(hidden))
        return product(inner, self._down, segments, self.layer.size), row_map

    def _segments(self, counts: list[int]) -> Tensor:
        block, start, runs = self._kernels.BLOCK, 0, []
        for expert, count in enumerate(counts):
            runs += [(start + i, min(block, count - i), expert) for i in range(0, count, block)]
            start += count
        return torch.tensor(runs, dtype=torch.int64).view(-1, 3)


class TorchExperts(Backend):
    """Any device and dtype: an expert that has rows is unpacked for its two products."""

    def __init__(self, layer: ExpertLayer, activations: str) -> None:
        super().__init__(layer, activations)
        self._experts: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def put(self, expert: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
        device = self.layer.device
        self._experts[expert] = [(c.to(device), s.to(device)) for c, s in (gate_up, down)]

    def run(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens, counts, row_map = sort_by_expert(ids, self.layer.num_experts)
        parts = self.rounded(x)[tokens].split(counts)
        rows = [self._expert(expert, part) for expert, part in enumerate(parts) if len(part)]
        return torch.cat([x.new_empty(0, self.layer.size), *rows]), row_map

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate_up, down = (decode(*packed, x.dtype) for packed in self._experts[expert])
        return linear(self.rounded(self.activate(linear(x, gate_up))), down)
