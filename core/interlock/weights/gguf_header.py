"""A strict reader for the header of GGUF files: metadata and tensor table, no tensor data.

Every count, length and offset is checked against the size of the file before it is used, so a
truncated or hostile file costs bounded time and memory and ends in a `WeightsError`. The layout
is the one of the GGUF specification, versions 2 and 3, little-endian. This module imports neither
torch nor numpy.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from interlock.errors import ModelNotFoundError, WeightsError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_ELEMENTS: Final = 1 << 23
"""Metadata values of one file, array elements included (a 256k vocabulary needs about 1.5 M)."""
MAX_DIMS: Final = 4
MAX_NAME_BYTES: Final = 1 << 16

TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""ggml type number -> (name, elements per block, bytes per block)."""

_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@attrs.frozen
class GGUFTensor:
    """One row of the tensor table; ``shape`` is in row-major order (outermost first)."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    """Position of the first byte in the file."""
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.nbytes // (self.rows or 1)

    @property
    def rows(self) -> int:
        count = 1
        for dim in self.shape[:-1]:
            count *= dim
        return count


@attrs.frozen
class GGUFHeader:
    """Metadata by key, and tensors by their GGUF name."""

    path: Path
    size: int
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def items(self, key: str) -> list[Any]:
        """An array of the metadata; empty if it is missing or no array."""
        value = self.metadata.get(key)
        return value if isinstance(value, list) else []

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of ``path``.

    Raises `ModelNotFoundError` if there is no such file, `WeightsError` if it isn't a complete
    GGUF file of a supported version and tensor types.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read ({error.strerror})") from error
    if not path.is_file():
        raise WeightsError(f"{path} is not a regular file; expected a GGUF file")
    return _read_cached(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_cached(path: Path, size: int, _mtime_ns: int) -> GGUFHeader:
    if size < 24:
        raise WeightsError(f"{path} is truncated: {size} bytes, a GGUF header has at least 24")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(path, data, size)


def _parse(path: Path, data: mmap.mmap, size: int) -> GGUFHeader:
    cursor = _Cursor(path, data, size)
    version = _check_magic(cursor)
    tensor_count = cursor.count(cursor.scalar("Q", "tensor count"), 24, "tensor count")
    kv_count = cursor.count(cursor.scalar("Q", "metadata count"), 13, "metadata count")
    metadata: dict[str, Any] = {}
    for index in range(kv_count):
        key = cursor.string(f"key of metadata entry {index}", MAX_NAME_BYTES)
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    alignment = _alignment(path, metadata)
    table = [_tensor_row(cursor, index, alignment) for index in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = _place(path, table, start, size)
    return GGUFHeader(path, size, version, metadata, tensors)


def _check_magic(cursor: _Cursor) -> int:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise WeightsError(
            f"{cursor.path} is not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}"
        )
    version = int(cursor.scalar("I", "version"))
    if version not in VERSIONS:
        hint = " (a big-endian file?)" if version and not version & 0xFFFF else ""
        raise WeightsError(
            f"{cursor.path}: GGUF version {version}{hint} is not supported; "
            f"supported: {', '.join(map(str, VERSIONS))}"
        )
    return version


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WeightsError(f"{path}: general.alignment must be a power of two, not {alignment!r}")
    if alignment > 1 << 20:
        raise WeightsError(f"{path}: general.alignment {alignment} is absurd (at most 1048576)")
    return alignment


def _tensor_row(cursor: _Cursor, index: int, alignment: int) -> GGUFTensor:
    path = cursor.path
    name = cursor.string(f"name of tensor {index}", MAX_NAME_BYTES)
    n_dims = cursor.scalar("I", f"dimension count of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise WeightsError(f"{path}: tensor {name!r} has {n_dims} dimensions (1 to {MAX_DIMS})")
    dims = [cursor.scalar("Q", f"dimensions of tensor {name!r}") for _ in range(n_dims)]
    type_id = cursor.scalar("I", f"type of tensor {name!r}")
    offset = cursor.scalar("Q", f"offset of tensor {name!r}")
    if offset % alignment:
        raise WeightsError(
            f"{path}: tensor {name!r} at offset {offset} is not aligned to {alignment} bytes"
        )
    label, nbytes = _layout(path, name, dims, type_id)
    return GGUFTensor(name, tuple(reversed(dims)), label, offset, nbytes)


def _layout(path: Path, name: str, dims: list[int], type_id: int) -> tuple[str, int]:
    if type_id not in TYPES:
        known = ", ".join(label for label, _, _ in TYPES.values())
        raise WeightsError(
            f"{path}: tensor {name!r} has ggml type {type_id}{_type_name(type_id)}, which is not "
            f"supported; supported: {known}. Convert the file to one of these"
        )
    label, block, block_bytes = TYPES[type_id]
    if 0 in dims or dims[0] % block:
        raise WeightsError(
            f"{path}: tensor {name!r} has dimensions {dims}; the first must be a positive "
            f"multiple of {block} for {label}"
        )
    elements = 1
    for dim in dims:
        elements *= dim
    return label, elements // block * block_bytes


def _type_name(type_id: int) -> str:
    try:
        from gguf.constants import GGMLQuantizationType

        return f" ({GGMLQuantizationType(type_id).name})"
    except (ImportError, ValueError):
        return ""


def _place(path: Path, table: list[GGUFTensor], start: int, size: int) -> dict[str, GGUFTensor]:
    """Turn relative offsets into absolute ones; all data must lie in the file, without overlap."""
    tensors: dict[str, GGUFTensor] = {}
    for row in table:
        if row.name in tensors:
            raise WeightsError(f"{path}: tensor {row.name!r} is listed twice")
        tensors[row.name] = attrs.evolve(row, offset=start + row.offset)
    needed = max((t.offset + t.nbytes for t in tensors.values()), default=0)
    if needed > size:
        cut = [t.name for t in tensors.values() if t.offset + t.nbytes > size]
        raise WeightsError(
            f"{path} is truncated or damaged: {size} bytes, but its tensors need {needed}; "
            f"incomplete: {summary(cut)}. Download the file again"
        )
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for left, right in itertools.pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise WeightsError(f"{path}: tensors {left.name!r} and {right.name!r} overlap")
    return tensors


def summary(names: list[str], limit: int = 5) -> str:
    """``a, b, c and 12 more``: names for one line of an error."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.position = 0
        self._data = data
        self._size = size
        self._elements = 0

    def _need(self, nbytes: int, what: str) -> None:
        if nbytes > self._size - self.position:
            raise WeightsError(
                f"{self.path} is truncated or damaged: {what} at byte {self.position} needs "
                f"{nbytes} bytes, but the file ends at byte {self._size}. Download the file again"
            )

    def take(self, nbytes: int, what: str) -> bytes:
        self._need(nbytes, what)
        start, self.position = self.position, self.position + nbytes
        return self._data[start : self.position]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def count(self, count: int, min_bytes: int, what: str) -> int:
        """Check that ``count`` items of at least ``min_bytes`` can be in the rest of the file."""
        self._need(count * min_bytes, f"{what} {count}")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise WeightsError(
                f"{self.path}: {what} {count} is absurd (at most {MAX_ELEMENTS} values in all)"
            )
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.scalar("Q", f"length of {what}")
        if limit is not None and length > limit:
            raise WeightsError(
                f"{self.path}: {what} has a length of {length} bytes (at most {limit})"
            )
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            # Some converters wrote single bytes of characters as tokens; they must stay distinct.
            return raw.decode(errors="surrogateescape")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _BOOL:
            return bool(self.scalar("B", f"value of {key!r}"))
        return self.scalar(self._code(kind, key), f"value of {key!r}")

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise WeightsError(f"{self.path}: metadata {key!r} has unknown value type {kind}")
        return _SCALARS[kind]

    def _array(self, key: str) -> list[Any]:
        kind = self.scalar("I", f"array type of {key!r}")
        length = self.scalar("Q", f"array length of {key!r}")
        what = f"array length of {key!r}"
        if kind == _STRING:
            self.count(length, 8, what)
            return [self.string(f"item {index} of {key!r}") for index in range(length)]
        if kind == _ARRAY:
            raise WeightsError(f"{self.path}: metadata {key!r} is an array of arrays")
        code = "?" if kind == _BOOL else self._code(kind, key)
        self.count(length, struct.calcsize(code), what)
        raw = self.take(length * struct.calcsize(code), key)
        return list(struct.unpack(f"<{length}{code}", raw))


def file_revision(path: Path) -> str:
    """Size and modification time of a file, as an id that changes when the file does."""
    stat = os.stat(path)
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"
