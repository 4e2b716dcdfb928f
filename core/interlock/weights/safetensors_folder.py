"""Tensors of a Hugging Face folder of safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from interlock.errors import WeightsError
from interlock.weights.packed_fp4 import FORMAT, PackedTensor
from interlock.weights.quantization import GROUP
from interlock.weights.safetensors_header import read_folder
from interlock.weights.source import TensorInfo, WeightSource, WeightTensor

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
# Ending of the codes, of the weight, of the scales; whether groups have a dimension of their own.
_LAYOUTS: Final = (
    (".weight_packed", ".weight", ".weight_scale", False),
    ("_blocks", "", "_scales", True),
)
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
        self._files = {name: info.file for name, info in self.infos.items()}
        self._pairs = _join_packed(self.infos)
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> WeightTensor:
        if name not in self.infos:
            raise WeightsError(f"tensor {name!r} is not in the model's files")
        info = self.infos[name]
        if name in self._pairs:
            codes, scale = self._pairs[name]
            return PackedTensor(info, (codes.name, scale.name), self._stored)
        if info.format not in _FLOATS:
            raise WeightsError(
                f"{info.file}: tensor {name!r} has dtype {info.format}; only floating-point "
                f"weights ({', '.join(sorted(_FLOATS))}) are read"
            )
        return _SafetensorsTensor(info, self._file(info.file))

    def _stored(self, name: str) -> torch.Tensor:
        """One tensor of a pair, as it is stored."""
        tensor: torch.Tensor = self._file(self._files[name]).get_tensor(name)
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


def _join_packed(infos: dict[str, TensorInfo]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Replace pairs of codes and scales in ``infos`` by the weight that they stand for.

    ``weight_packed`` and ``weight_scale`` are compressed-tensors' names, ``_blocks`` and
    ``_scales`` gpt-oss's, whose codes have the 16 bytes of a group in a dimension of their own.
    """
    pairs: dict[str, tuple[TensorInfo, TensorInfo]] = {}
    for name in [name for name, info in infos.items() if info.format == "U8"]:
        for ending, weight, other, split in _LAYOUTS:
            if name.endswith(ending):
                base = name.removesuffix(ending)
                pairs[base + weight] = _pair(infos, name, base + other, split)
    for name, (codes, scale) in pairs.items():
        nbytes = codes.nbytes + scale.nbytes
        shape = (*scale.shape[:-1], scale.shape[-1] * GROUP)
        infos[name] = TensorInfo(name, shape, FORMAT, codes.file, nbytes)
    return pairs


def _pair(
    infos: dict[str, TensorInfo], name: str, scale_name: str, split: bool
) -> tuple[TensorInfo, TensorInfo]:
    if scale_name not in infos:
        raise WeightsError(f"{infos[name].file}: {name} is missing its scales {scale_name}")
    codes, scale = infos.pop(name), infos.pop(scale_name)
    if scale.format != "U8":
        raise WeightsError(f"{scale.file}: {scale_name} must be U8 (E8M0), not {scale.format}")
    inner = (scale.shape[-1], GROUP // 2) if split else (scale.shape[-1] * GROUP // 2,)
    if codes.shape != (*scale.shape[:-1], *inner):
        raise WeightsError(
            f"{codes.file}: {name} {list(codes.shape)} does not fit {scale_name} "
            f"{list(scale.shape)}: a scale belongs to {GROUP} inputs, a byte to 2"
        )
    return codes, scale
