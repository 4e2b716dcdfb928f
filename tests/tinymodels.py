"""Tiny random models with a real tokenizer, written in milliseconds: GGUF files and HF folders.

Two layers, hidden size 64, 512 tokens, context 512. The weights are random but scaled so that
greedy output varies; the same seed gives the same model in both formats (up to quantization).

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = write_tiny_hf(tmp_path / "tiny", "Qwen3ForCausalLM", num_hidden_layers=3)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = """
The capital of France is Paris, and the capital of Germany is Berlin. A small model learns a few
words: the, of, and, to, in, that, is, was, for, with, as, his, they, be, at, one, have, this, from.
Once upon a time there was a little engine that could count: one, two, three, four, five, six,
seven, eight, nine, ten. It counted tokens all day long, and at night it dreamed of longer prompts.
"What is the answer?" asked the user. "The answer is forty-two," answered the engine, "but what
was the question?" The user thought about the question for a long time and then asked another one.
def add(first, second): return first + second
for index in range(10): print(index, add(index, index + 1))
class Engine: pass  # an engine that runs, stops, waits, and then runs again
Streaming, batching, caching, scheduling, sampling, decoding, encoding, loading, saving, testing.
Große Städte, schöne Grüße, élève, naïve, café, 東京, Москва, and some emoji: 🚀 🙂 🎉.
"""


@dataclass(frozen=True)
class TinySpec:
    """Sizes under their Hugging Face names, and the seed of the weights."""

    architecture: str = "LlamaForCausalLM"
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 512
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    seed: int = 0

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.architecture == "Qwen2ForCausalLM"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.architecture != "Qwen2ForCausalLM"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 500 tokens (single digits; any text round-trips)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    return tokenizer


def tiny_weights(spec: TinySpec) -> dict[str, np.ndarray]:
    """Float32 tensors under their Hugging Face names."""
    random = np.random.default_rng(spec.seed)

    def normal(*shape: int, scale: float | None = None) -> np.ndarray:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (random.standard_normal(shape) * scale).astype(np.float32)

    hidden, head_dim = spec.hidden_size, spec.head_dim
    weights = {"model.embed_tokens.weight": normal(spec.vocab_size, hidden, scale=0.7)}
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in _linears(spec):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns)
            if bias:
                weights[f"{prefix}{name}.bias"] = normal(rows, scale=0.3)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if spec.qk_norm:
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        for name, size in norms.items():
            weights[f"{prefix}{name}.weight"] = 1 + normal(size, scale=0.2)
    weights["model.norm.weight"] = 1 + normal(hidden, scale=0.2)
    if not spec.tie_word_embeddings:
        weights["lm_head.weight"] = normal(spec.vocab_size, hidden, scale=0.4)
    return weights


def _linears(spec: TinySpec) -> list[tuple[str, int, int, bool]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    return [
        ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q, spec.output_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]


def write_tiny_hf(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    drop: Sequence[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **overrides: Any,
) -> Path:
    """Write a Hugging Face folder and return it.

    ``overrides`` are fields of `TinySpec`; ``config`` adds or replaces keys of config.json; tensors
    named in ``drop`` are left out and those of ``extra`` added.
    """
    spec = replace(TinySpec(architecture=architecture), **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v for k, v in tiny_weights(spec).items() if k not in drop}
    _save_shards(folder, weights | dict(extra or {}), shards)
    settings = hf_config(spec) | dict(config or {})
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def hf_config(spec: TinySpec) -> dict[str, Any]:
    """config.json of a spec."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "tie_word_embeddings"),
    )
    config = {name: getattr(spec, name) for name in names}
    if spec.architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        config["attention_bias"] = spec.attention_bias
    if spec.architecture == "LlamaForCausalLM":
        config["mlp_bias"] = spec.mlp_bias
    if spec.architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    return config | {
        "architectures": [spec.architecture],
        "model_type": spec.architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
    }


def _save_shards(folder: Path, weights: Mapping[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        mine = names[index::shards]
        save_file({name: weights[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    total = sum(array.nbytes for array in weights.values())
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


_GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_tiny_gguf(
    path: Path,
    *,
    quant: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = False,
    metadata: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    **overrides: Any,
) -> Path:
    """Write a GGUF file and return its path.

    ``quant`` is the format of the matrices (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0),
    ``metadata`` adds integer, float, bool and string keys, ``drop`` and ``extra`` take GGUF tensor
    names, ``overrides`` are fields of `TinySpec`.
    """
    spec = replace(TinySpec(), **overrides)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, _GGUF_ARCHITECTURES[spec.architecture])
    _add_sizes(writer, spec)
    _add_tokenizer(writer, add_bos, chat_template)
    for key, value in (metadata or {}).items():
        _ADDERS[type(value)](writer, key, value)
    tensors = {gguf_name(name): _permuted(spec, name, a) for name, a in tiny_weights(spec).items()}
    for name, array in (tensors | dict(extra or {})).items():
        if name not in drop:
            _add_tensor(writer, name, array, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ADDERS: dict[type, Any] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_GLOBAL_NAMES:
        return f"{_GGUF_GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"


def _permuted(spec: TinySpec, name: str, array: np.ndarray) -> np.ndarray:
    """Llama files keep q and k with interleaved rotary pairs, as the converter writes them."""
    if _GGUF_ARCHITECTURES[spec.architecture] != "llama":
        return array
    if ".q_proj." in name:
        heads = spec.num_attention_heads
    elif ".k_proj." in name:
        heads = spec.num_key_value_heads
    else:
        return array
    rows = array.shape[0]
    pairs = array.reshape(heads, 2, rows // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _add_sizes(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, add_bos: bool, chat_template: str | None) -> None:
    state = json.loads(tiny_tokenizer().to_str())
    vocab = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
    merges = [" ".join(m) if isinstance(m, list) else m for m in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.CONTROL if token in SPECIAL_TOKENS else kinds.NORMAL for token, _ in vocab]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, quant: str) -> None:
    if array.ndim == 1 or quant == "F32" or array.dtype == np.uint8:
        writer.add_tensor(name, array.astype(np.float32))
        return
    kind = gguf.GGMLQuantizationType[quant]
    data = gguf.quants.quantize(array, kind)
    if quant == "F16":
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, data, raw_dtype=kind)
