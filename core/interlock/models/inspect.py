"""What the files of a model say about it, without loading a weight or importing torch.

A folder with nothing but a ``config.json`` can be inspected too, if the family's tensors follow
from it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs

from interlock.errors import ConfigError
from interlock.parallel.sharing import share
from interlock.weights.chat_template import find_template
from interlock.weights.config import DTYPE_BYTES, load_config
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.fields import read_object
from interlock.weights.gguf_header import read_header
from interlock.weights.quantization import GROUP
from interlock.weights.safetensors_header import DTYPE_BITS, read_folder
from interlock.weights.tensors_kimi import kimi_tensors

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles

LENGTHS: Final = (1024, 8192, 32768, 131072, 1048576)
MARGIN: Final = 0.1
"""Share of a device's memory that is left to activations, communication and the runtime."""
_UNITS: Final = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS_10: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# What every rank holds whole: norms, routers, low-rank first halves, latents and mixers.
_WHOLE: Final = re.compile(
    r"norm|\.f_a_proj|\.g_a_proj|\.kv_a_proj|\.q_a_proj|\.gate\.|routed_expert_|_res_"
)
_VISION: Final = re.compile(r"^(vision_tower|mm_projector)\.")
_HEADS: Final = ("lm_head.weight", "output.weight")
_TABLES: Final = ("embed_tokens.weight", "token_embd.weight")
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int

    @property
    def parameters(self) -> int:
        """Numbers that it stands for: two per packed byte, and none in the scales."""
        if self.name.endswith("weight_scale"):
            return 0
        return math.prod(self.shape) * (2 if self.name.endswith("weight_packed") else 1)


def describe(
    files: ModelFiles, *, tp: int = 1, dtype: str = "bfloat16", device_memory: int | None = None
) -> dict[str, Any]:
    """Facts for ``interlock models inspect``: sizes, formats, cache and state cost, what fits.

    Raises `WeightsError` as loading would for everything that the headers show, and `ConfigError`
    if the heads cannot be shared by ``tp`` ranks.
    """
    config = load_config(files)
    config.check_tp(tp)
    tensors, paths = _tensors(files, config)
    facts = {
        "name": files.name,
        "path": str(files.path),
        "kind": files.kind,
        "revision": files.revision,
        "architecture": config.architecture,
        "tensors": len(tensors),
        "parameters": sum(t.parameters for t in tensors if not _VISION.search(t.name)),
        "vision_parameters": sum(t.parameters for t in tensors if _VISION.search(t.name)),
        "active_parameters": _active(tensors, config),
        "tensor_bytes": sum(t.nbytes for t in tensors),
        "file_bytes": sum(path.stat().st_size for path in paths),
        "formats": _formats(tensors),
        "context": config.max_position_embeddings,
        "kv_bytes_per_token": _kv_bytes(config),
        "state_bytes_per_sequence": config.state_bytes_per_sequence(DTYPE_BYTES[dtype]),
        "chat_template": find_template(files) is not None or isinstance(config, KimiConfig),
        "per_rank": _per_rank(tensors, config, tp, DTYPE_BYTES[dtype]),
    }
    if device_memory is not None:
        facts["fits"] = _fits(facts["per_rank"], device_memory, config.max_position_embeddings)
    return {**facts, "config": attrs.asdict(config)}


def _tensors(files: ModelFiles, config: Any) -> tuple[list[Tensor], list[Path]]:
    """Every tensor, and the files that hold them."""
    if files.kind == "gguf":
        rows = read_header(files.path).tensors.values()
        return [Tensor(t.name, t.shape, t.format, t.nbytes) for t in rows], [files.path]
    if isinstance(config, KimiConfig) and not any(files.path.glob("*.safetensors*")):
        return _from_config(files.path, config), []
    stored = read_folder(files.path).values()
    paths = sorted({t.file for t in stored})
    return [Tensor(t.name, t.shape, t.format, t.nbytes) for t in stored], paths


def _from_config(folder: Path, config: KimiConfig) -> list[Tensor]:
    data = read_object(folder / "config.json")
    text = data.get("text_config", data)
    packed = text.get("quantization_config") is not None
    sized = kimi_tensors(config, packed=packed, vision=data.get("vision_config"))
    return [
        Tensor(name, t.shape, t.format, math.prod(t.shape) * DTYPE_BITS[t.format] // 8)
        for name, t in sized.items()
    ]


def _active(tensors: Iterable[Tensor], config: Any) -> int:
    """Parameters that one token of text is multiplied with.

    Of the routed experts those that it is sent to, and not the table that it is looked up in,
    unless that is the head as well.
    """
    text = [t for t in tensors if not _VISION.search(t.name)]
    routed = sum(t.parameters for t in text if _EXPERT.search(t.name))
    rest = sum(t.parameters for t in text) - routed
    if any(t.name.endswith(_HEADS) for t in text):
        rest -= sum(t.parameters for t in text if t.name.endswith(_TABLES))
    if not isinstance(config, KimiConfig) or not config.num_experts:
        return rest + routed
    return rest + routed * config.num_experts_per_token // config.num_experts


def _formats(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    formats: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in tensors:
        formats[tensor.format]["tensors"] += 1
        formats[tensor.format]["bytes"] += tensor.nbytes
    return dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"]))


def _kv_bytes(config: Any) -> dict[str, int]:
    dtypes = ("bfloat16", "float32")
    return {dtype: config.kv_bytes_per_token(DTYPE_BYTES[dtype]) for dtype in dtypes}


def _per_rank(tensors: list[Tensor], config: Any, tp: int, element: int) -> dict[str, Any]:
    """Bytes of the fullest rank: weights as stored and as the bare core holds them, and caches.

    The vision part is left out, as loading leaves it out.
    """
    experts = _largest_share(getattr(config, "moe_intermediate_size", 1) or 1, tp)
    stored = dense = whole = 0.0
    for tensor in (t for t in tensors if not _VISION.search(t.name)):
        whole += tensor.nbytes if _WHOLE.search(tensor.name) else 0
        part = 1.0 if _WHOLE.search(tensor.name) else 1 / tp
        if _EXPERT.search(tensor.name):
            part = experts
        stored += tensor.nbytes * part
        packed = tensor.name.endswith(("weight_packed", "weight_scale"))
        dense += part * (tensor.parameters * element if packed else tensor.nbytes)
    kimi = isinstance(config, KimiConfig)
    kv_heads = 1 if kimi else max(1, config.num_key_value_heads // tp) / config.num_key_value_heads
    return {
        "tp": tp,
        "weight_bytes_as_stored": round(stored),
        "weight_bytes_dense_experts": round(dense),
        "weight_bytes_on_every_rank": round(whole),
        "kv_bytes_per_token": round(config.kv_bytes_per_token(element) * kv_heads),
        "state_bytes_per_sequence": config.state_bytes_per_sequence(element, tp),
    }


def _largest_share(inner: int, tp: int) -> float:
    ranges = [share(inner, GROUP, rank, tp) for rank in range(tp)]
    return max(stop - start for start, stop in ranges) / inner


def _fits(rank: dict[str, Any], memory: int, context: int) -> dict[str, Any]:
    """Sequences of a length that fit beside the stored weights, all of one length.

    The bare core dequantizes packed experts; whether that fits is a figure of its own.
    """
    usable = memory - round(memory * MARGIN)
    free = usable - rank["weight_bytes_as_stored"]
    lengths = [length for length in LENGTHS if length < context] + [context]
    cost = {n: rank["state_bytes_per_sequence"] + n * rank["kv_bytes_per_token"] for n in lengths}
    return {
        "device_memory_bytes": memory,
        "margin_bytes": memory - usable,
        "left_for_caches_bytes": max(0, free),
        "weights_fit": free > 0,
        "weights_with_dense_experts_fit": usable > rank["weight_bytes_dense_experts"],
        "sequences_of_tokens": {str(n): max(0, free // each) for n, each in cost.items()},
    }


def parse_bytes(text: str, name: str = "--device-memory") -> int:
    """``288GiB``, ``80GB`` or plain bytes; raises ConfigError naming the option."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = (_UNITS | _UNITS_10).get(match[2].upper()) if match else None
    if match is None or factor is None or not 1 <= float(match[1]) * factor < 2**63:
        raise ConfigError(f"{name}: {text!r} is no amount of memory; write it like 288GiB or 80GB")
    return int(float(match[1]) * factor)
