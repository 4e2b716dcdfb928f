"""RMS normalization, alone or together with the residual addition in front of it."""

from __future__ import annotations

import torch
from torch import Tensor

from interlock.ops import OpTable
from interlock.weights.source import WeightSource


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, name: str, size: int, eps: float, ops: OpTable) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self._ops = ops
        self.weight: Tensor

    def load(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = source.get(f"{self.name}.weight").dense(dtype).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized sum, and the sum (the new residual)."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
