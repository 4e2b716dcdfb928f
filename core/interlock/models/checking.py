"""Whether a model's files have the tensors that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from interlock.errors import WeightsError
from interlock.layers.projection import Shapes
from interlock.weights.gguf_header import summary
from interlock.weights.source import WeightSource

Shape = tuple[int, ...]


def _same(name: str, found: Shape, wanted: Shape) -> bool:  # noqa: ARG001 - one of several rules
    return found == wanted


def require(
    expected: Shapes, source: WeightSource, fits: Callable[[str, Shape, Shape], bool] = _same
) -> None:
    """Raise `WeightsError` naming tensors that are missing, or whose shape does not fit."""
    missing = [name for name in expected if name not in source.infos]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(expected)} tensors are missing from the model's files: "
            f"{summary(missing)}"
        )
    wrong = [
        f"{name} is {list(source.infos[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if not fits(name, source.infos[name].shape, shape)
    ]
    if wrong:
        raise WeightsError(f"tensors do not fit the configuration: {summary(wrong)}")
