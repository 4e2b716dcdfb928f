"""Tensors of a model by their Hugging Face names, whatever the file format.

`open_weights` gives a `WeightSource`; nothing is read until `WeightTensor.dense` or `.blocks` is
called, and each call reads anew, so that a loader holds one tensor at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import torch

from interlock.weights.quantization import GROUP

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles


@attrs.frozen
class TensorInfo:
    """What is known of a tensor without reading it.

    ``format`` is a safetensors dtype (``F32``, ``BF16``, …), a GGUF block format (``Q4_1``, …), or
    ``MXFP4`` in any container.
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

    def part(self, dim: int, start: int, stop: int) -> WeightTensor:
        """Elements ``start`` to ``stop`` of dimension ``dim``, as a tensor of its own."""
        return self if (start, stop) == (0, self.info.shape[dim]) else Part(self, dim, start, stop)

    def blocks(self) -> torch.Tensor | None:
        """Raw GGUF blocks, uint8 [rows, bytes per row], or None for a format without blocks."""
        return None

    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """MXFP4 codes uint8 [rows, K / 2] and scales uint8 [rows, K / 32], or None.

        In the layout of `interlock.weights.packed_fp4`, whatever the file's own; a tensor of more
        dimensions has its leading ones joined.
        """
        return None


class Part(WeightTensor):
    """A range of another tensor's rows or columns; what another rank needs is dropped again."""

    def __init__(self, whole: WeightTensor, dim: int, start: int, stop: int) -> None:
        shape = tuple(stop - start if d == dim else n for d, n in enumerate(whole.info.shape))
        share = (stop - start) / max(1, whole.info.shape[dim])
        nbytes = round(whole.info.nbytes * share)
        super().__init__(attrs.evolve(whole.info, shape=shape, nbytes=nbytes))
        self._whole, self._dim, self._range = whole, dim, (start, stop)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        start, stop = self._range
        return self._whole.dense(dtype).narrow(self._dim, start, stop - start).contiguous()

    def blocks(self) -> torch.Tensor | None:
        blocks = self._whole.blocks()
        if blocks is None:
            return None
        start, stop = self._range
        if self._dim == 1:
            # Columns are in blocks of a fixed size; a range never cuts one: see `Projection`.
            bytes_each = blocks.shape[1] / self._whole.info.shape[1]
            start, stop = round(start * bytes_each), round(stop * bytes_each)
        return blocks.narrow(self._dim, start, stop - start).contiguous()

    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None too if the range cuts a group of 32 columns."""
        whole = self._whole.packed()
        if whole is None or len(self.info.shape) != 2:
            return None
        start, stop = self._range
        if self._dim == 1 and (start % GROUP or stop % GROUP):
            return None
        step = [2, GROUP] if self._dim == 1 else [1, 1]
        codes, scale = (
            t.narrow(self._dim, start // n, (stop - start) // n).contiguous()
            for t, n in zip(whole, step, strict=True)
        )
        return codes, scale


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


def open_weights(files: ModelFiles, config: Any) -> WeightSource:
    """Open a model's weights; `WeightsError` for anything missing, truncated or malformed."""
    if files.kind == "gguf":
        from interlock.weights.gguf_file import GGUFSource

        return GGUFSource(files.path, config)
    from interlock.weights.safetensors_folder import SafetensorsSource

    return SafetensorsSource(files.path)
