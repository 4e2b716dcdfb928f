"""Tensors of a GGUF file: raw blocks for kernels that take them, or dequantized.

The header is checked by `gguf_header` before a byte of data is touched; block formats are decoded
by the `gguf` library, a bounded number of rows at a time.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from interlock.errors import WeightsError
from interlock.weights.config import ModelConfig
from interlock.weights.config_gguf import hf_name
from interlock.weights.gguf_header import GGUFTensor, read_header
from interlock.weights.packed_fp4 import FORMAT, check_packed, decode
from interlock.weights.quantization import GROUP
from interlock.weights.source import TensorInfo, WeightSource, WeightTensor

_DIRECT: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS: Final = 1 << 22
# Tensors that other tools need and this engine computes itself.
_IGNORED: Final = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})


class GGUFSource(WeightSource):
    """The weights in one GGUF file, mapped into memory."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        header = read_header(path)
        names = {name: hf_name(name) for name in header.tensors if name not in _IGNORED}
        self._tensors = {hf: header.tensors[name] for name, hf in names.items() if hf is not None}
        self.unexpected = tuple(name for name, hf in names.items() if hf is None)
        self.infos = {
            name: TensorInfo(name, tensor.shape, tensor.format, path, tensor.nbytes)
            for name, tensor in self._tensors.items()
        }
        self._heads = _interleaved_heads(header.architecture, config)
        with path.open("rb") as file:
            if path.stat().st_size != header.size:
                raise WeightsError(f"{path} changed while it was read")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def get(self, name: str) -> WeightTensor:
        if name not in self._tensors:
            raise WeightsError(f"tensor {name!r} is not in the file")
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2], 0)
        return _GGUFTensorReader(self.infos[name], self._tensors[name], self._map, heads)

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:
            # A caller still holds a view; the map goes with the last one.
            return


def _interleaved_heads(architecture: str, config: ModelConfig) -> dict[str, int]:
    """Heads by projection whose rotary pairs the converter interleaved (llama only)."""
    if architecture != "llama":
        return {}
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}


class _GGUFTensorReader(WeightTensor):
    def __init__(self, info: TensorInfo, row: GGUFTensor, data: mmap.mmap, heads: int) -> None:
        super().__init__(info)
        self._row = row
        self._data = data
        self._order = half_split_order(row.shape[0], heads) if heads else None

    def _bytes(self) -> npt.NDArray[np.uint8]:
        """Read-only view of the data, uint8 [rows, bytes per row]."""
        tensor = self._row
        flat = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(tensor.rows, tensor.row_bytes)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self.packed()
        if packed is not None:
            return decode(*packed, dtype).reshape(self.info.shape)
        direct = _DIRECT.get(self.info.format)
        if direct is None:
            dense = self._dequantized(dtype)
        else:
            # A writable copy first: torch warns about memory that it cannot write to.
            dense = torch.from_numpy(self._bytes().copy()).view(direct).to(dtype)
        dense = dense.reshape(self.info.shape)
        return dense if self._order is None else dense[self._order]

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[self.info.format]
        raw = self._bytes()
        columns = self.info.shape[-1]
        dense = torch.empty(len(raw), columns, dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, len(raw), step):
            values = quants.dequantize(raw[start : start + step], kind)
            dense[start : start + step] = torch.from_numpy(values)
        return dense

    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ggml's block is a scale, then 16 bytes with inputs 0 to 15 low and 16 to 31 high."""
        if self.info.format != FORMAT:
            return None
        blocks = torch.from_numpy(self._bytes().copy())
        if self._order is not None:
            blocks = blocks[self._order]
        blocks = blocks.view(len(blocks), -1, 1 + GROUP // 2)
        scale, body = blocks[..., 0].contiguous(), blocks[..., 1:]
        values = torch.cat([body & 15, body >> 4], dim=-1)
        codes = (values[..., 0::2] | values[..., 1::2] << 4).flatten(1)
        check_packed(codes, scale, self.info.name, f"{self.info.name}, its scales")
        return codes, scale

    def blocks(self) -> torch.Tensor | None:
        if self.info.format in _DIRECT:
            return None
        raw = torch.from_numpy(self._bytes().copy())
        return raw if self._order is None else raw[self._order]


def half_split_order(rows: int, heads: int) -> torch.Tensor:
    """Row indices that bring interleaved rotary pairs (x0 y0 x1 y1 …) to halves (x… y…).

    llama.cpp's converter stores each head's rows of q and k as pairs; Hugging Face models rotate
    the first half of a head against the second.
    """
    if rows % (2 * heads):
        raise WeightsError(f"{rows} rows cannot be split into {heads} heads of rotary pairs")
    order = torch.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.transpose(1, 2).reshape(rows)
