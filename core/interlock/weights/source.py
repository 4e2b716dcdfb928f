"""Tensors of a model by their Hugging Face names, whatever the file format.

`open_weights` gives a `WeightSource`; nothing is read until `WeightTensor.dense` or `.blocks` is
called, and each call reads anew, so that a loader holds one tensor at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import attrs
import torch

from interlock.weights.config import ModelConfig

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles


@attrs.frozen
class TensorInfo:
    """What is known of a tensor without reading it.

    ``format`` is a safetensors dtype (``F32``, ``BF16``, …) or a GGUF block format (``Q4_1``, …).
    """

    name: str
    shape: tuple[int, ...]
    format: str
    file: Path
    nbytes: int


class WeightTensor(ABC):
    """One tensor of a source, readable as numbers or as raw blocks."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """A new CPU tensor of ``info.shape``, dequantized if need be."""

    def blocks(self) -> torch.Tensor | None:
        """Raw GGUF blocks, uint8 [rows, bytes per row], or None for a format without blocks."""
        return None


class WeightSource(ABC):
    """All tensors of one model. Close it (or use ``with``) when loading is done."""

    infos: Mapping[str, TensorInfo]
    unexpected: tuple[str, ...] = ()
    """Names in the files that no tensor of this model family has."""

    @abstractmethod
    def get(self, name: str) -> WeightTensor: ...

    @abstractmethod
    def close(self) -> None:
        """Release files and memory maps."""

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_weights(files: ModelFiles, config: ModelConfig) -> WeightSource:
    """Open a model's weights; `WeightsError` for anything missing, truncated or malformed."""
    if files.kind == "gguf":
        from interlock.weights.gguf_file import GGUFSource

        return GGUFSource(files.path, config)
    from interlock.weights.safetensors_folder import SafetensorsSource

    return SafetensorsSource(files.path)
