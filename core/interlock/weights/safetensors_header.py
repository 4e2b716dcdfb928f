"""A strict reader for safetensors headers and sharded indexes. Imports no torch.

A file is ``u64 length | JSON header | data``. Everything is checked against the file's size, and
an index against the files that it names, before any weight is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from interlock.errors import WeightsError
from interlock.weights.fields import read_object
from interlock.weights.gguf_header import summary

MAX_HEADER_BYTES: Final = 100_000_000
DTYPE_BITS: Final = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
} | {"U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8}


@attrs.frozen
class StoredTensor:
    name: str
    shape: tuple[int, ...]
    format: str
    file: Path
    nbytes: int


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, sharded or not.

    Raises `WeightsError` naming missing shards, missing or truncated tensors and bad indexes.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _read_sharded(folder, _weight_map(index))
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file; only this format is read")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read_file(file)
    return tensors


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{index}: tensor {name!r} names the file {file!r}")
    return weight_map


def _read_sharded(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise WeightsError(
            f"{folder}: {len(missing)} of {len(files)} weight files are missing: "
            f"{summary(missing)}. Download the model again"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read_file(folder / file)
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise WeightsError(f"{folder}: the index lists tensors that are absent: {summary(absent)}")
    return tensors


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Header of one file, checked against the file's size."""
    if not path.is_file():
        raise WeightsError(f"{path} is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if len(start) < 8 or length > size - 8:
            raise WeightsError(
                f"{path} is truncated or damaged: {size} bytes, header of {length} bytes announced"
            )
        if length > MAX_HEADER_BYTES:
            raise WeightsError(f"{path}: a header of {length} bytes is absurd")
        header = _parse(path, file.read(length))
    return _tensors(path, header, 8 + length, size)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path} is damaged: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _tensors(
    path: Path, header: Mapping[str, Any], start: int, size: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    cut: list[str] = []
    needed = start
    for name, entry in header.items():
        tensors[name], end = _tensor(path, name, entry)
        needed = max(needed, start + end)
        if start + end > size:
            cut.append(name)
    if cut:
        raise WeightsError(
            f"{path} is truncated: {size} bytes, but its tensors need {needed}; "
            f"incomplete: {summary(cut)}. Download the file again"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    try:
        kind, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        whole = all(type(value) is int and value >= 0 for value in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(f"{path}: the entry of tensor {name!r} is malformed") from error
    if kind not in DTYPE_BITS:
        known = ", ".join(DTYPE_BITS)
        raise WeightsError(f"{path}: tensor {name!r} has unknown dtype {kind!r}; known: {known}")
    bits = DTYPE_BITS[kind]
    for dim in shape:
        bits *= dim if whole else 0
    if not whole or bits // 8 != end - begin:
        raise WeightsError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {kind} does not fit its "
            f"data range {begin} to {end}"
        )
    return StoredTensor(name, shape, kind, path, end - begin), end
