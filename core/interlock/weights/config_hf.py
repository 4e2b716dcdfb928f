"""`ModelConfig` from the config.json of a Hugging Face folder (both its old and new key names)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from interlock.errors import WeightsError
from interlock.weights.config import (
    ARCHITECTURES,
    ModelConfig,
    RopeScaling,
    refuse_sliding_window,
    unsupported_architecture,
)
from interlock.weights.config_kimi import KIMI, KimiConfig, from_fields
from interlock.weights.fields import Fields, read_object
from interlock.weights.quantization import PACKED_FORMAT, refuse_quantization

_MODEL_TYPES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}
# What the library that wrote the file assumes for a key that isn't there.
_MAX_POSITIONS: Final = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}


class TokenFacts(NamedTuple):
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def token_facts(folder: Path) -> TokenFacts:
    """What a tokenizer needs of ``config.json``, whatever the architecture."""
    fields = _fields(folder)
    if "text_config" in fields.data:
        fields = fields.object("text_config")
    bos = fields.ids("bos_token_id")
    return TokenFacts(fields.integer("vocab_size"), bos[0] if bos else None, _eos(folder, fields))


def architecture_of(folder: Path, extra: Sequence[str] = ()) -> str:
    """The architecture that ``config.json`` names: the core's or one of ``extra``."""
    return _architecture(_fields(folder), extra)


def from_folder(folder: Path, extra: Sequence[str] = ()) -> ModelConfig | KimiConfig:
    """Read ``config.json`` and, for the end-of-sequence ids, ``generation_config.json``.

    Architectures in ``extra`` are accepted beside the core's.
    """
    fields = _fields(folder)
    architecture = _architecture(fields, extra)
    if architecture in KIMI:
        return from_fields(fields, architecture, _eos(folder, fields))
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    max_positions = fields.integer(
        "max_position_embeddings", _MAX_POSITIONS.get(architecture, 32768)
    )
    _refuse(fields, architecture, max_positions)
    tokens = token_facts(folder)
    bias = fields.flag("attention_bias", architecture == "Qwen2ForCausalLM")
    return ModelConfig(
        architecture=architecture,
        vocab_size=tokens.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", _kv_heads(architecture, heads)),
        head_dim=fields.integer(
            "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // max(heads, 1)
        ),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope(fields).number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(fields, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=bias and architecture not in ("Qwen2ForCausalLM",),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        hidden_act=str(fields.data.get("hidden_act", "silu")),
        bos_token_id=tokens.bos_token_id,
        eos_token_ids=tokens.eos_token_ids,
        dtype=_dtype(fields),
    )


def _fields(folder: Path) -> Fields:
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(f"{folder} has no config.json; it isn't a Hugging Face model folder")
    return Fields(path, read_object(path))


def _kv_heads(architecture: str, heads: int) -> int:
    if architecture == "MistralForCausalLM":
        return 8
    return heads if architecture == "LlamaForCausalLM" else 32


def stated_architecture(folder: Path) -> str:
    """The architecture that ``config.json`` names, whether or not anybody runs it."""
    return _stated(_fields(folder))


def _stated(fields: Fields) -> str:
    names = fields.data.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    model_type = str(fields.data.get("model_type", ""))
    return _MODEL_TYPES.get(model_type, model_type)


def _architecture(fields: Fields, extra: Sequence[str] = ()) -> str:
    name = _stated(fields)
    if name not in (*ARCHITECTURES, *extra):
        raise unsupported_architecture(name, str(fields.path))
    return name


def _refuse(fields: Fields, architecture: str, max_positions: int) -> None:
    """Stop on options that would silently change the results."""
    quantization = fields.data.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("format") == PACKED_FORMAT:
        refuse_quantization(fields)
    elif quantization:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise WeightsError(
            f"{fields.path}: weights quantized with {method!r} are not supported; "
            f"use the unquantized model or a GGUF file"
        )
    rotary = _rope(fields).data.get("partial_rotary_factor") or fields.data.get(
        "partial_rotary_factor", 1.0
    )
    if rotary != 1.0:
        raise WeightsError(f"{fields.path}: partial_rotary_factor {rotary} is not supported")
    refuse_sliding_window(_sliding_window(fields, architecture), max_positions, str(fields.path))


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window of the layers that use one, or None (Qwen has one only if switched on)."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        window = fields.data.get("sliding_window", 4096)
        return None if window is None else fields.integer("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False) or fields.data.get("sliding_window", 0) is None:
        return None
    layers = fields.integer("num_hidden_layers")
    types = fields.data.get("layer_types")
    if types is None:
        slides = fields.integer("max_window_layers", 28) < layers
    else:
        slides = "sliding_attention" in types
    return fields.integer("sliding_window", 4096) if slides else None


def _rope(fields: Fields) -> Fields:
    data = fields.data.get("rope_parameters") or fields.data.get("rope_scaling") or {}
    if not isinstance(data, dict):
        raise WeightsError(f"{fields.path}: rope_scaling must be an object, not {data!r}")
    return Fields(fields.path, data)


def _rope_scaling(fields: Fields, max_positions: int) -> RopeScaling:
    rope = _rope(fields)
    kind = rope.data.get("rope_type") or rope.data.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    original = int(
        fields.optional_number("original_max_position_embeddings")
        or rope.number("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        return _yarn(rope, original, max_positions)
    raise WeightsError(
        f"{fields.path}: RoPE scaling {kind!r} is not supported; "
        f"supported: default, linear, llama3, yarn"
    )


def _yarn(rope: Fields, original: int, max_positions: int) -> RopeScaling:
    return RopeScaling(
        kind="yarn",
        factor=rope.optional_number("factor") or max_positions / original,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=float(rope.data.get("beta_fast") or 32),
        beta_slow=float(rope.data.get("beta_slow") or 1),
        mscale=rope.data.get("mscale"),
        mscale_all_dim=rope.data.get("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _eos(folder: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json wins: chat models list their end-of-turn token only there."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = Fields(path, read_object(path)).ids("eos_token_id")
        if ids:
            return tuple(dict.fromkeys(ids + fields.ids("eos_token_id")))
    return fields.ids("eos_token_id")


def _dtype(fields: Fields) -> str:
    value = fields.data.get("dtype") or fields.data.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")
