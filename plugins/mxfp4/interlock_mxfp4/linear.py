"""Linear layers whose weight stays packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from interlock.weights.source import WeightTensor
from interlock_mxfp4.kernels.reference import Packed
from interlock_mxfp4.layers import Counts, Loss, packed_of


class PackedLinear:
    """``x W^T + b`` from MXFP4 codes and scales. Satisfies `interlock.extension.LinearMethod`.

    ``path`` is ``cpu`` for the packed kernel of `interlock_mxfp4.cpu`, ``triton`` for a GPU's;
    otherwise the weight is unpacked for every product: right anywhere, and as small, but slow.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, device: torch.device, path: str, counts: Counts
    ) -> None:
        self._name, self._dtype, self._device = name, dtype, device
        self._path, self._counts = path, counts
        if path == "cpu":
            from interlock_mxfp4 import cpu

            cpu.product_kernel(dtype)
            self._kernels = cpu

    def create_weights(self, in_features: int, out_features: int) -> None:  # noqa: ARG002
        self._columns = out_features

    def load(self, parts: Sequence[WeightTensor], bias: Tensor | None) -> None:
        loss = Loss(self._name)
        stored = [packed_of(part, loss) for part in parts]
        loss.say()
        codes, scale = (torch.cat(tensors) for tensors in zip(*stored, strict=True))
        self._counts.packed_bytes += codes.nbytes + scale.nbytes
        self._bias = None if bias is None else bias.to(self._dtype).to(self._device)
        if self._path == "cpu":
            from interlock.ops.cpu_linear import pack_bias

            self._weight = self._kernels.pack_panels(codes, scale)[None]
            if bias is not None:
                self._bias = pack_bias(bias)
        else:
            self._packed = Packed(codes.to(self._device)[None], scale.to(self._device)[None])

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, K] to [T, N]."""
        self._counts.calls += 1
        if self._path == "cpu":
            segments = self._kernels.whole(len(x))
            return self._kernels.product(x, self._weight, segments, self._columns, self._bias)
        if self._path == "triton":
            from interlock_mxfp4.gpu import packed_linear

            return packed_linear(x, self._packed, self._bias)
        return linear(x, self._packed.dense(0, x.dtype), self._bias)
