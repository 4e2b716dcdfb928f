"""The gated feed-forward block (SwiGLU, Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from interlock.layers.projection import Build, Projection, Shapes
from interlock.weights.source import WeightSource

GROUP = 32
"""Inputs that share a scale in block formats; a range of columns never cuts a group."""


class MLP:
    """Gate and up are one linear layer. ``activation`` [T, 2F] -> [T, F] may be another one."""

    def __init__(
        self,
        name: str,
        hidden: int,
        inner: int,
        build: Build,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._activation = activation or build.ops.silu_mul
        self.gate_up = Projection(
            f"{name}.gate_up_proj",
            hidden,
            [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)],
            build,
            bias=bias,
            shard="out",
            unit=GROUP,
        )
        self.down = Projection(
            f"{name}.down_proj",
            inner,
            [(f"{name}.down_proj", hidden)],
            build,
            bias=bias,
            shard="in",
            unit=GROUP,
        )

    def expected(self) -> Shapes:
        return self.gate_up.expected() | self.down.expected()

    def load(self, source: WeightSource) -> None:
        self.gate_up.load(source)
        self.down.load(source)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.gate_up(x)))
