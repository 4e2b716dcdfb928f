"""Tensors of a Hugging Face folder of safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from interlock.errors import WeightsError
from interlock.weights.safetensors_header import read_folder
from interlock.weights.source import TensorInfo, WeightSource, WeightTensor

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
# Buffers that old checkpoints saved although they follow from the configuration.
_DERIVED: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class SafetensorsSource(WeightSource):
    """The weights of one folder; files are mapped when a tensor of theirs is first asked for."""

    def __init__(self, folder: Path) -> None:
        stored = read_folder(folder)
        self.infos = {
            name: TensorInfo(name, tensor.shape, tensor.format, tensor.file, tensor.nbytes)
            for name, tensor in stored.items()
            if not name.endswith(_DERIVED)
        }
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> WeightTensor:
        if name not in self.infos:
            raise WeightsError(f"tensor {name!r} is not in the model's files")
        info = self.infos[name]
        if info.format not in _FLOATS:
            raise WeightsError(
                f"{info.file}: tensor {name!r} has dtype {info.format}; only floating-point "
                f"weights ({', '.join(sorted(_FLOATS))}) are read"
            )
        return _SafetensorsTensor(info, self._file(info.file))

    def raw(self, name: str) -> torch.Tensor:
        """The stored tensor, of whatever dtype."""
        if name not in self.infos:
            raise WeightsError(f"tensor {name!r} is not in the model's files")
        tensor: torch.Tensor = self._file(self.infos[name].file).get_tensor(name)
        return tensor

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safetensors.safe_open(path, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error
        return self._open[path]

    def close(self) -> None:
        self._open.clear()


class _SafetensorsTensor(WeightTensor):
    def __init__(self, info: TensorInfo, file: Any) -> None:
        super().__init__(info)
        self._file = file

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(self.info.name)
        return tensor.to(dtype, copy=True)
