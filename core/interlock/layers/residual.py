"""Block attention residuals (Kimi K3): layers read a mix of earlier blocks instead of their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from interlock.layers.projection import Build, Shapes
from interlock.ops.reference import wide
from interlock.weights.source import WeightSource


class ResidualMix:
    """One mixer: a score per candidate from a norm and one row of weights."""

    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        self._name, self._size, self._eps, self._build = name, size, eps, build

    def expected(self) -> Shapes:
        size = self._size
        return {f"{self._name}_norm.weight": (size,), f"{self._name}_proj.weight": (1, size)}

    def load(self, source: WeightSource) -> None:
        kind, device = wide(self._build.dtype), self._build.device
        self._norm = source.get(f"{self._name}_norm.weight").dense(kind).to(device)
        self._proj = source.get(f"{self._name}_proj.weight").dense(kind)[0].to(device)

    def __call__(self, blocks: list[Tensor], running: Tensor) -> Tensor:
        """``blocks`` and ``running`` [T, D] to one [T, D]."""
        candidates = torch.stack([*blocks, running])
        return self._build.ops.residual_mix(candidates, self._norm, self._proj, self._eps)
