"""What the files of a model say about it, without loading a weight or importing torch."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from interlock.weights.chat_template import find_template
from interlock.weights.config import DTYPE_BYTES, ModelConfig, load_config
from interlock.weights.gguf_header import read_header
from interlock.weights.safetensors_header import read_folder

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles


def describe(files: ModelFiles) -> dict[str, Any]:
    """Facts for ``interlock models inspect``: sizes, tensor formats, cache cost, template.

    Keys: ``name``, ``path``, ``kind``, ``revision``, ``architecture``, ``parameters``,
    ``tensor_bytes``, ``file_bytes``, ``formats`` (format -> tensors and bytes), ``context``,
    ``kv_bytes_per_token`` (by dtype), ``chat_template`` (whether there is one), ``config``.
    Raises `WeightsError` as loading would, for everything that the headers show.
    """
    config = load_config(files)
    tensors, paths = _tensors(files)
    return {
        "name": files.name,
        "path": str(files.path),
        "kind": files.kind,
        "revision": files.revision,
        "architecture": config.architecture,
        "parameters": sum(math.prod(shape) for shape, _, _ in tensors),
        "tensor_bytes": sum(nbytes for _, _, nbytes in tensors),
        "file_bytes": sum(path.stat().st_size for path in paths),
        "formats": _formats(tensors),
        "context": config.max_position_embeddings,
        "kv_bytes_per_token": _kv_bytes(config),
        "chat_template": find_template(files) is not None,
        "config": attrs.asdict(config),
    }


def _tensors(files: ModelFiles) -> tuple[list[tuple[tuple[int, ...], str, int]], list[Path]]:
    """(shape, format, bytes) of every tensor, and the files that hold them."""
    if files.kind == "gguf":
        rows = read_header(files.path).tensors.values()
        return [(t.shape, t.format, t.nbytes) for t in rows], [files.path]
    stored = read_folder(files.path).values()
    paths = sorted({t.file for t in stored})
    return [(t.shape, t.format, t.nbytes) for t in stored], paths


def _formats(tensors: list[tuple[tuple[int, ...], str, int]]) -> dict[str, dict[str, int]]:
    formats: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for _, label, nbytes in tensors:
        formats[label]["tensors"] += 1
        formats[label]["bytes"] += nbytes
    return dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"]))


def _kv_bytes(config: ModelConfig) -> dict[str, int]:
    dtypes = ("bfloat16", "float32")
    return {dtype: config.kv_bytes_per_token(DTYPE_BYTES[dtype]) for dtype in dtypes}
