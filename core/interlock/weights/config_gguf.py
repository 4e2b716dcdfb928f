"""`ModelConfig` and Hugging Face tensor names from the header of a GGUF file."""

from __future__ import annotations

import re
from typing import Any, Final

from interlock.errors import WeightsError
from interlock.weights.config import (
    ModelConfig,
    RopeScaling,
    refuse_sliding_window,
    unsupported_architecture,
)
from interlock.weights.gguf_header import GGUFHeader

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "model.rope_freqs",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FREQS: Final = "model.rope_freqs.weight"
"""Divisors of the rotary frequencies ([head_dim / 2]), which Llama 3 files carry as a tensor."""

_CONTROL: Final = 3  # a value of tokenizer.ggml.token_type

# Written by converters as end-of-turn tokens; only some files name them in their metadata.
END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one that this family doesn't have."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    match = _LAYER.fullmatch(stem)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{kind}"


def from_gguf(header: GGUFHeader) -> ModelConfig:
    """Derive the configuration; sizes that tensors show are taken from them."""
    name = header.architecture
    if name not in _ARCHITECTURES:
        raise unsupported_architecture(name, str(header.path))
    meta = _Meta(header, name)
    _refuse(meta)
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    max_positions = meta.integer("context_length")
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=_vocab_size(header),
        hidden_size=hidden,
        intermediate_size=meta.integer("feed_forward_length"),
        num_hidden_layers=meta.integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=meta.integer("attention.head_count_kv", heads),
        head_dim=meta.integer("attention.key_length", hidden // max(heads, 1)),
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=meta.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(meta, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        bos_token_id=_token_id(header, "bos_token_id"),
        eos_token_ids=end_of_sequence(header),
        dtype="float32" if _stored_in(header) == "F32" else "bfloat16",
    )


class _Meta:
    """Typed access to the keys of one architecture, with errors that name file and key."""

    def __init__(self, header: GGUFHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.error(key, f"differs between layers ({value[:4]}…): not supported")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
            raise self.error(key, f"must be a non-negative integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def error(self, key: str, message: str) -> WeightsError:
        return WeightsError(f"{self.header.path}: {self.prefix}.{key} {message}")


def _refuse(meta: _Meta) -> None:
    """Stop on options that would silently change the results."""
    if meta.integer("expert_count", 0):
        raise meta.error("expert_count", f"{meta.get('expert_count')}: experts are not supported")
    head_dim = meta.integer("embedding_length") // max(meta.integer("attention.head_count"), 1)
    key_length = meta.integer("attention.key_length", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, key_length) != key_length:
            raise meta.error(key, f"{meta.get(key)} differs from the head size {key_length}")
    window = meta.integer("attention.sliding_window", 0)
    refuse_sliding_window(window, meta.integer("context_length"), str(meta.header.path))


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{header.path}: the two-dimensional token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(meta: _Meta, max_positions: int) -> RopeScaling:
    kind = meta.get("rope.scaling.type", "linear" if meta.get("rope.scale_linear") else "none")
    if kind == "none":
        return RopeScaling()
    factor = meta.number("rope.scaling.factor", meta.get("rope.scale_linear") or 1.0)
    if kind == "linear":
        return RopeScaling(kind="linear" if factor != 1.0 else "default", factor=factor)
    if kind != "yarn":
        raise meta.error("rope.scaling.type", f"{kind!r} is not supported (none, linear, yarn)")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=meta.integer(
            "rope.scaling.original_context_length", max_positions
        ),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def end_of_sequence(header: GGUFHeader) -> tuple[int, ...]:
    """Ids that end a generation: the file's own, and end-of-turn tokens known by their text."""
    named = [_token_id(header, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    tokens = header.items("tokenizer.ggml.tokens")
    kinds = header.items("tokenizer.ggml.token_type")
    control = (i for i, kind in enumerate(kinds) if kind == _CONTROL and i < len(tokens))
    by_text = [i for i in control if tokens[i] in END_OF_TURN]
    return tuple(dict.fromkeys(i for i in (*named, *by_text) if i is not None))


def _token_id(header: GGUFHeader, key: str) -> int | None:
    value = header.get(f"tokenizer.ggml.{key}")
    if value is not None and (not isinstance(value, int) or value < 0):
        raise WeightsError(f"{header.path}: tokenizer.ggml.{key} must be an id, not {value!r}")
    return value


def _stored_in(header: GGUFHeader) -> str:
    """The format of the largest tensor."""
    return max(header.tensors.values(), key=lambda t: t.nbytes).format
