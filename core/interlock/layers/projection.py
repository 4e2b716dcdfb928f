"""A linear layer together with the checkpoint tensors that make it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import Tensor

from interlock.layers.linear import Linear, RowKinds
from interlock.ops import OpTable
from interlock.ops.reference import wide
from interlock.parallel.group import SINGLE, TensorParallel
from interlock.weights.source import WeightSource

if TYPE_CHECKING:
    from interlock.extension import ExpertLayer, ExpertMethod

Shapes = dict[str, tuple[int, ...]]


@attrs.frozen
class Build:
    """What every layer of a model needs to be built."""

    ops: OpTable
    linear_method: Callable[..., Any]
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool | None = None
    tp: TensorParallel = SINGLE
    kinds: RowKinds = attrs.field(factory=RowKinds)
    expert_method: Callable[[ExpertLayer], ExpertMethod | None] = lambda _: None


def widened(build: Build) -> Build:
    """For layers whose arithmetic is float32 even in a half-precision model."""
    return attrs.evolve(build, dtype=wide(build.dtype))


class Projection:
    """One merged linear: the outputs of ``parts`` (checkpoint name, rows) side by side.

    ``shard="out"``: a rank holds a share of every part's rows; ``unit`` rows stay together (a
    head). A part with fewer units than ranks is held by several ranks.
    ``shard="in"``: a rank holds a share of the columns, in multiples of ``unit``, and the result is
    summed over the ranks unless ``reduce`` is False.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        build: Build,
        *,
        bias: bool = False,
        shard: Literal["out", "in"] | None = None,
        unit: int = 1,
        reduce: bool = True,
    ) -> None:
        self._parts = list(parts)
        self._in_features = in_features
        self._bias = bias
        self._build = build
        self._sums = shard == "in" and reduce and build.tp.size > 1
        self._columns = build.tp.share(in_features, unit) if shard == "in" else (0, in_features)
        self._rows = [rows_of(rows, unit, build.tp, shard == "out") for _, rows in parts]
        sizes = [stop - start for start, stop in self._rows]
        self.out_features = sum(sizes)
        self.linear = Linear(
            name,
            self._columns[1] - self._columns[0],
            sizes,
            build.linear_method,
            dtype=build.dtype,
            device=build.device,
            batch_invariant=build.batch_invariant,
            kinds=build.kinds,
        )

    def expected(self) -> Shapes:
        """The whole tensors' shapes, whatever this rank holds."""
        shapes: Shapes = {}
        for name, rows in self._parts:
            shapes[f"{name}.weight"] = (rows, self._in_features)
            if self._bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def load(self, source: WeightSource) -> None:
        if not self.linear.in_features or not self.out_features:
            return
        weights = [
            source.get(f"{name}.weight").part(0, *rows).part(1, *self._columns)
            for (name, _), rows in zip(self._parts, self._rows, strict=True)
        ]
        self.linear.load(weights, self._load_bias(source) if self._bias else None)

    def _load_bias(self, source: WeightSource) -> Tensor:
        dtype, device = self._build.dtype, self._build.device
        biases = [
            source.get(f"{name}.bias").part(0, *rows).dense(dtype)
            for (name, _), rows in zip(self._parts, self._rows, strict=True)
        ]
        joined = torch.cat(biases).to(device)
        # Summed over the ranks, a bias counts once.
        return joined if not self._sums or self._build.tp.rank == 0 else torch.zeros_like(joined)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.linear.in_features or not self.out_features:
            # More ranks than units: this one has no part in the layer.
            y = x.new_zeros(len(x), self.out_features)
        else:
            y = self.linear(x)
        return self._build.tp.all_reduce(y) if self._sums else y


def rows_of(total: int, unit: int, tp: TensorParallel, sharded: bool) -> tuple[int, int]:
    """This rank's rows. With fewer units than ranks, neighbouring ranks hold the same unit."""
    if not sharded:
        return 0, total
    units = total // unit
    if units and tp.size > units and tp.size % units == 0:
        first = tp.rank * units // tp.size
        return first * unit, (first + 1) * unit
    return tp.share(total, unit)
