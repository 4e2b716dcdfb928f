"""`interlock models quantize`: a folder in compressed-tensors' layout, weights in MXFP4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from interlock.errors import ConfigError
from interlock.weights.config import load_config
from interlock.weights.export import copy_folder, write_config
from interlock.weights.packed_fp4 import FORMAT, decode, pack
from interlock.weights.quantization import GROUP, PACKED_FORMAT
from interlock.weights.resolve import ModelFiles
from interlock.weights.source import TensorInfo, WeightSource, open_weights
from interlock_mxfp4.layers import Loss
from interlock_mxfp4.settings import IGNORED

SHARD_BYTES: Final = 4 * 2**30
NO_LINEAR: Final = re.compile(r"embed|norm|_res_proj$|conv1d|vision_tower|mm_projector")
EXPERT: Final = re.compile(r"\.experts\.\d+\.")


@attrs.frozen
class Row:
    """What became of one weight."""

    name: str
    shape: tuple[int, ...]
    relative_error: float
    largest_error: float


def quantize(
    files: ModelFiles,
    target: Path,
    scope: str = "all",
    ignore: Sequence[str] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[Row]:
    """Write ``files`` to ``target`` with the matrices of ``scope`` in MXFP4.

    ``scope`` is ``experts``, ``linear`` (all others) or ``all``; ``ignore`` has regular
    expressions of modules to keep (default: head, routers and KDA's beta). Other tensors go to
    bfloat16, unless they are float32 already. Raises `ConfigError` if nothing can be quantized.
    """
    patterns = [re.compile(pattern) for pattern in (IGNORED if ignore is None else ignore)]
    with open_weights(files, load_config(files)) as source:
        infos = list(source.infos.values())
        chosen = [info for info in infos if _wanted(info, scope, patterns)]
        if not chosen:
            raise ConfigError(
                f"--scope {scope}: no matrix of {files.name} is quantized by that; {_hint(infos)}"
            )
        config = copy_folder(files, target)
        rows: list[Row] = []
        names = {info.name for info in chosen}
        tensors = _tensors(source, infos, names, rows, progress)
        _write_shards(tensors, target)
    _describe(config, infos, names)
    write_config(config, target)
    return rows


def _hint(infos: Iterable[TensorInfo]) -> str:
    if any(info.format == FORMAT for info in infos):
        return "it is stored in MXFP4 already"
    return f"a matrix needs a multiple of {GROUP} inputs, and no pattern of --ignore may match it"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_matrix(info: TensorInfo) -> bool:
    """A linear layer's weight, by its shape and what checkpoints call it."""
    named = info.name.endswith(".weight") and not NO_LINEAR.search(_module(info.name))
    return named and len(info.shape) == 2


def _wanted(info: TensorInfo, scope: str, ignore: Sequence[re.Pattern[str]]) -> bool:
    if not _is_matrix(info) or info.shape[1] % GROUP or info.format == FORMAT:
        return False
    expert = EXPERT.search(info.name) is not None
    if scope != "all" and expert != (scope == "experts"):
        return False
    return not any(pattern.search(_module(info.name)) for pattern in ignore)


def _tensors(
    source: WeightSource,
    infos: Sequence[TensorInfo],
    names: set[str],
    rows: list[Row],
    progress: Callable[[str, float], None] | None,
) -> Iterator[tuple[str, Tensor]]:
    for done, info in enumerate(infos):
        tensor = source.get(info.name)
        packed = tensor.packed()
        if info.name in names:
            weight = tensor.dense(torch.float32)
            packed = pack(weight, info.name)
            rows.append(_row(info, weight, decode(*packed, torch.float32)))
        if packed is not None:
            base = _module(info.name)
            yield f"{base}.weight_packed", packed[0]
            yield f"{base}.weight_scale", packed[1]
        else:
            yield info.name, tensor.dense(_dtype(info))
        if progress is not None:
            progress("quantizing", (done + 1) / len(infos))


def _dtype(info: TensorInfo) -> torch.dtype:
    return torch.float32 if info.format == "F32" else torch.bfloat16


def _row(info: TensorInfo, weight: Tensor, values: Tensor) -> Row:
    loss = Loss(info.name)
    loss.add(info.format, weight, values)
    return Row(info.name, info.shape, loss.relative, loss.largest)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Files of some gigabytes, and the index that names them if there are several."""
    shard: dict[str, Tensor] = {}
    files: list[dict[str, int]] = []
    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            files.append(_save(shard, target, len(files)))
            shard = {}
    if shard or not files:
        files.append(_save(shard, target, len(files)))
    final = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        final = ["model.safetensors"]
    for index, name in enumerate(final):
        (target / f"part-{index}.safetensors").rename(target / name)
    if len(files) > 1:
        weight_map = {name: final[i] for i, sizes in enumerate(files) for name in sizes}
        total = sum(sum(sizes.values()) for sizes in files)
        index_data = {"metadata": {"total_size": total}, "weight_map": weight_map}
        path = target / "model.safetensors.index.json"
        path.write_text(json.dumps(index_data, indent=2), encoding="utf-8")


def _save(shard: dict[str, Tensor], target: Path, index: int) -> dict[str, int]:
    path = target / f"part-{index}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    # safetensors makes files that only their owner can read.
    path.chmod(0o644)
    return {name: tensor.nbytes for name, tensor in shard.items()}


def _describe(config: dict[str, Any], infos: Sequence[TensorInfo], names: set[str]) -> None:
    """Add compressed-tensors' ``quantization_config``, where the text part's fields are."""
    packed = names | {info.name for info in infos if info.format == FORMAT}
    kept = [_module(i.name) for i in infos if _is_matrix(i) and i.name not in packed]
    if config.get("tie_word_embeddings"):
        kept.append("lm_head")
    part = config.get("text_config", config)
    config.pop("quantization_config", None)
    part["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": PACKED_FORMAT,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": GROUP,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
                "input_activations": None,
            }
        },
        "ignore": kept,
    }
