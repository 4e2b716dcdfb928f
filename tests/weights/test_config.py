"""Configurations from config.json and from GGUF metadata; everything unsupported is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tinymodels
from interlock.errors import WeightsError
from interlock.weights.config import ModelConfig, load_config
from interlock.weights.resolve import local_files

ALL = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hf(tmp_path: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> ModelConfig:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    spec = tinymodels.TinySpec(architecture=architecture)
    settings = tinymodels.hf_config(spec) | config
    settings = {key: value for key, value in settings.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(settings))
    return load_config(local_files(folder))


def gguf(tmp_path: Path, **options: Any) -> ModelConfig:
    return load_config(local_files(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", **options)))


@pytest.mark.parametrize("architecture", ALL)
def test_architectures(tmp_path: Path, architecture: str) -> None:
    config = hf(tmp_path, architecture)
    assert config.architecture == architecture
    assert config.attention_bias == (architecture == "Qwen2ForCausalLM")
    assert not config.attention_output_bias
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (2, 16, 512)
    assert config.eos_token_ids == (tinymodels.IM_END,)


@pytest.mark.parametrize("architecture", ALL)
def test_gguf_says_the_same_as_the_folder(tmp_path: Path, architecture: str) -> None:
    ours, theirs = gguf(tmp_path, architecture=architecture), hf(tmp_path, architecture)
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "qk_norm"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.attention_bias == theirs.attention_bias
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert not ours.tie_word_embeddings


def test_gguf_without_output_is_tied(tmp_path: Path) -> None:
    assert gguf(tmp_path, tie_word_embeddings=True).tie_word_embeddings


def test_missing_architectures_fall_back_to_model_type(tmp_path: Path) -> None:
    assert hf(tmp_path, "Qwen3ForCausalLM", architectures="absent").qk_norm


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "", "llama"])
def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=r"not supported; supported: LlamaForCausalLM, Mistral"):
        hf(tmp_path, architectures=[name])


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="architecture 'mamba' is not supported"):
        gguf(tmp_path, metadata={"general.architecture": "mamba"})


def test_rope_scaling_variants(tmp_path: Path) -> None:
    assert hf(tmp_path).rope_scaling.kind == "default"
    linear = hf(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert (linear.rope_scaling.kind, linear.rope_scaling.factor) == ("linear", 2.0)
    llama3 = hf(tmp_path, rope_scaling=LLAMA3).rope_scaling
    assert (llama3.kind, llama3.original_max_position_embeddings) == ("llama3", 64)
    yarn = hf(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope_scaling
    assert (yarn.kind, yarn.original_max_position_embeddings) == ("yarn", 512)


def test_rope_parameters_are_the_new_name(tmp_path: Path) -> None:
    config = hf(tmp_path, rope_theta="absent", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert (config.rope_theta, config.rope_scaling.kind) == (5e5, "llama3")


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope"])
def test_unbuilt_rope_scaling_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(WeightsError, match=f"RoPE scaling '{kind}' is not supported"):
        hf(tmp_path, rope_scaling={"rope_type": kind, "factor": 2.0})


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf(tmp_path, metadata=keys).rope_scaling.factor == 4.0
    keys = {"llama.rope.scaling.type": "longrope"}
    with pytest.raises(WeightsError, match="longrope"):
        gguf(tmp_path, metadata=keys)


@pytest.mark.parametrize(
    ("architecture", "config", "refused"),
    [
        ("MistralForCausalLM", {"sliding_window": 128}, True),
        ("MistralForCausalLM", {"sliding_window": 512}, False),
        ("MistralForCausalLM", {"sliding_window": None}, False),
        ("MistralForCausalLM", {"sliding_window": "absent"}, False),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, False),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0},
            True,
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
            False,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            True,
        ),
    ],
)
def test_sliding_window(
    tmp_path: Path, architecture: str, config: dict[str, Any], refused: bool
) -> None:
    if not refused:
        hf(tmp_path, architecture, **config)
        return
    with pytest.raises(WeightsError, match=r"sliding-window attention \(128 of 512 tokens\)"):
        hf(tmp_path, architecture, **config)


def test_gguf_sliding_window(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="sliding-window"):
        gguf(tmp_path, metadata={"llama.attention.sliding_window": 64})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a non-negative integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with 'awq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be token ids"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ],
)
def test_malformed_fields_are_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        hf(tmp_path, **config)


def test_expert_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="experts are not supported"):
        gguf(tmp_path, metadata={"llama.expert_count": 8})


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    hf(tmp_path)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_config(local_files(tmp_path / "model")).eos_token_ids == (7, 2)


def test_truncated_config_json(tmp_path: Path) -> None:
    hf(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(WeightsError, match=r"config\.json is not valid JSON"):
        load_config(local_files(tmp_path / "model"))


def test_kv_bytes_per_token(tmp_path: Path) -> None:
    assert hf(tmp_path).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_random_values_never_escape_as_tracebacks(tmp_path: Path) -> None:
    """Any value under any key gives a configuration or a WeightsError."""
    rng = random.Random(3)
    values: list[Any] = [None, -1, 0, 7, 2**70, 1.5, "x", "", [], [1], [None], {}, {"a": 1}, True]
    spec = tinymodels.TinySpec(architecture="Qwen2ForCausalLM")
    keys = [
        *tinymodels.hf_config(spec),
        *("rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window"),
        *("layer_types", "quantization_config", "partial_rotary_factor", "dtype"),
    ]
    outcomes = set()
    for _ in range(400):
        changes = {key: rng.choice(values) for key in rng.sample(keys, 2)}
        try:
            hf(tmp_path, "Qwen2ForCausalLM", **changes)
            outcomes.add("loaded")
        except WeightsError:
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}
