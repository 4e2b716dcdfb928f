"""A linear layer together with the checkpoint tensors that make it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from interlock.layers.linear import Linear, RowKinds
from interlock.ops import OpTable
from interlock.weights.source import WeightSource

Shapes = dict[str, tuple[int, ...]]


@attrs.frozen
class Build:
    """What every layer of a model needs to be built."""

    ops: OpTable
    linear_method: Callable[..., Any]
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool | None = None
    kinds: RowKinds = attrs.field(factory=RowKinds)


class Projection:
    """One merged linear: the outputs of ``parts`` (checkpoint name, rows) side by side."""

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        build: Build,
        *,
        bias: bool = False,
    ) -> None:
        self._parts = list(parts)
        self._in_features = in_features
        self._bias = bias
        self._build = build
        rows = [size for _, size in parts]
        self.linear = Linear(
            name,
            in_features,
            rows,
            build.linear_method,
            dtype=build.dtype,
            device=build.device,
            batch_invariant=build.batch_invariant,
            kinds=build.kinds,
        )

    def expected(self) -> Shapes:
        shapes: Shapes = {}
        for name, rows in self._parts:
            shapes[f"{name}.weight"] = (rows, self._in_features)
            if self._bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def load(self, source: WeightSource) -> None:
        weights = [source.get(f"{name}.weight") for name, _ in self._parts]
        self.linear.load(weights, self._load_bias(source) if self._bias else None)

    def _load_bias(self, source: WeightSource) -> Tensor:
        dtype, device = self._build.dtype, self._build.device
        biases = [source.get(f"{name}.bias").dense(dtype) for name, _ in self._parts]
        return torch.cat(biases).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)
