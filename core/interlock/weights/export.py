"""A model's folder without its weights, in Hugging Face's layout. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from interlock.errors import ConfigError, WeightsError
from interlock.tokenizer import Tokenizer
from interlock.weights.chat_template import find_template
from interlock.weights.config import ModelConfig, load_config
from interlock.weights.fields import read_object
from interlock.weights.resolve import HUB_PATTERNS, ModelFiles

_TYPES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
    "tie_word_embeddings", "mlp_bias", "hidden_act", "bos_token_id",
)  # fmt: skip


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``target`` if the block succeeds and goes otherwise.

    Raises `ConfigError` if ``target`` is there already, or cannot be made.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is no empty folder; name another one")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_folder(files: ModelFiles, target: Path) -> dict[str, Any]:
    """Write everything but weights and ``config.json`` to ``target``; returns the configuration."""
    if files.kind == "gguf":
        return _from_gguf(files, target)
    for pattern in HUB_PATTERNS:
        for path in sorted(files.path.glob(pattern)):
            if not path.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copyfile(path, target / path.name)
    return dict(read_object(files.path / "config.json"))


def write_config(config: dict[str, Any], target: Path) -> None:
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _from_gguf(files: ModelFiles, target: Path) -> dict[str, Any]:
    config, tokenizer = load_config(files), Tokenizer.load(files)
    if not isinstance(config, ModelConfig) or config.rope_scaling.kind != "default":
        raise WeightsError(
            f"{files.path}: a stretched context cannot be written as a Hugging Face folder; "
            "start from the model's own folder"
        )
    tokenizer.save(target / "tokenizer.json")
    special = {k: v for k, v in tokenizer.special_tokens.as_variables().items() if v}
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    facts["add_bos_token"] = tokenizer.add_bos
    if template := find_template(files):
        facts["chat_template"] = template
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return _config_of(config)


def _config_of(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [config.architecture],
        "model_type": _TYPES[config.architecture],
        **{name: getattr(config, name) for name in _SAME},
        "attention_bias": config.attention_bias,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
