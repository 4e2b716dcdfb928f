"""The gated feed-forward block (SwiGLU, Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

from __future__ import annotations

from torch import Tensor

from interlock.layers.projection import Build, Projection, Shapes
from interlock.weights.config import ModelConfig
from interlock.weights.source import WeightSource

GROUP = 32
"""Inputs that share a scale in block formats; a range of columns never cuts a group."""


class MLP:
    """Gate and up are one linear layer."""

    def __init__(self, name: str, config: ModelConfig, build: Build) -> None:
        inner = config.intermediate_size
        self._silu_mul = build.ops.silu_mul
        self.gate_up = Projection(
            f"{name}.gate_up_proj",
            config.hidden_size,
            [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)],
            build,
            bias=config.mlp_bias,
            shard="out",
            unit=GROUP,
        )
        self.down = Projection(
            f"{name}.down_proj",
            inner,
            [(f"{name}.down_proj", config.hidden_size)],
            build,
            bias=config.mlp_bias,
            shard="in",
            unit=GROUP,
        )

    def expected(self) -> Shapes:
        return self.gate_up.expected() | self.down.expected()

    def load(self, source: WeightSource) -> None:
        self.gate_up.load(source)
        self.down.load(source)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))
