"""Kimi configurations, packed weights, and what can be said of a checkpoint without loading it."""

from __future__ import annotations

import json

import pytest
import torch

from interlock.cli import main
from interlock.errors import ConfigError, ModelNotFoundError, WeightsError
from interlock.models.inspect import describe, parse_bytes
from interlock.weights.config import load_config
from interlock.weights.packed_fp4 import E2M1, pack, unpack
from interlock.weights.resolve import local_files, resolve
from interlock.weights.safetensors_header import read_folder
from interlock.weights.tensors_kimi import kimi_tensors
from tinykimi import config_of, write_tiny_kimi

PACKED = {"quantization_config": {"format": "mxfp4-pack-quantized"}}
EIGHT_BITS = {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


def read(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(local_files(folder))


def test_the_configuration_of_k3():
    config = load_config(resolve("kimi-k3", needs_weights=False))
    assert config.full_attention_layers[:2] == (3, 7)
    assert config.full_attention_layers[-2:] == (91, 92)
    assert (config.num_mla_layers, config.num_kda_layers) == (24, 69)
    assert (config.is_moe(0), config.is_moe(1)) == (False, True)
    assert (config.gate_lower_bound, config.attn_res_block_size) == (-5.0, 12)
    assert config.eos_token_ids == (163586,)


def test_k3_as_it_was_published():
    facts = describe(resolve("kimi-k3", needs_weights=False), tp=8)
    assert facts["tensors"] == 497_220
    assert round(facts["parameters"] / 1e12, 3) == 2.779
    assert round(facts["active_parameters"] / 1e9, 1) == 104.2
    assert facts["kv_bytes_per_token"]["bfloat16"] == 27_648
    assert facts["state_bytes_per_sequence"] == 449_372_160
    assert facts["per_rank"]["state_bytes_per_sequence"] == 449_372_160 // 8
    assert facts["formats"]["U8"]["tensors"] == 92 * 896 * 6
    # Shapes counted by hand from the published layer sizes.
    layers = kimi_tensors(load_config(resolve("kimi-k3", needs_weights=False)), packed=False)

    def parameters(prefix):
        import math

        return sum(math.prod(t.shape) for n, t in layers.items() if n.startswith(prefix))

    root = "language_model.model.layers"
    assert parameters(f"{root}.0.self_attn") == 443_740_416
    assert parameters(f"{root}.3.self_attn") == 232_196_096
    assert parameters(f"{root}.1.block_sparse_moe.experts.5.") == 33_030_144
    experts = sum(parameters(f"{root}.1.block_sparse_moe.experts.{e}.") for e in (0, 895)) // 2
    assert parameters(f"{root}.1.block_sparse_moe") - 896 * experts == 189_927_808


def test_k3_cannot_be_run_from_its_configuration(capsys):
    with pytest.raises(ModelNotFoundError, match=r"only the configuration is here.*--model PATH"):
        resolve("kimi-k3")
    assert main(["generate", "--model", "kimi-k3", "a"]) == 1
    assert "only the configuration is here" in capsys.readouterr().err


def test_a_drafter_is_no_model_by_itself(capsys):
    for command in (["models", "inspect", "k3-nano-dspark"], ["generate", "--model"]):
        arguments = command if "inspect" in command else [*command, "k3-nano-dspark", "a"]
        assert main(arguments) == 1
        assert "'k3-nano-dspark' is the drafter of 'k3-nano'" in capsys.readouterr().err
    assert main(["models", "pull", "k3-nano-dspark"]) == 0
    assert capsys.readouterr().out.strip().endswith("k3-nano-dspark")


def test_a_quantization_that_stands_outside_of_the_text_part(tmp_path):
    config = config_of() | {"quantization_config": {"quant_method": "awq", "format": "gemm"}}
    with pytest.raises(WeightsError, match=r"quantization_config.format 'gemm'"):
        read(tmp_path, config)


def test_the_vision_part_takes_no_memory_of_a_rank():
    facts = describe(resolve("kimi-k3", needs_weights=False), tp=1)
    text = facts["tensor_bytes"] - 2 * facts["vision_parameters"]
    assert facts["per_rank"]["weight_bytes_as_stored"] == text
    assert 0 < facts["per_rank"]["weight_bytes_on_every_rank"] < text // 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "much"], "--device-memory: 'much' is no amount of memory"),
        (["--device-memory", "0GiB"], "no amount of memory"),
        (["--device-memory", "9" * 400], "no amount of memory"),
        (["--tp", "0"], "--tp must be at least 1"),
        (["--tp", "7"], "engine.tp: num_attention_heads is 96"),
    ],
)
def test_inspect_names_what_is_wrong(arguments, message, capsys):
    assert main(["models", "inspect", "kimi-k3", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("288GiB", 288 * 2**30), ("80 GB", 80 * 10**9), ("1024", 1024)]
)
def test_amounts_of_memory(text, value):
    assert parse_bytes(text) == value


def test_what_fits(capsys):
    assert (
        main(["models", "inspect", "kimi-k3", "--tp", "8", "--device-memory", "288GiB", "--json"])
        == 0
    )
    fits = json.loads(capsys.readouterr().out)["fits"]
    one = 449_372_160 // 8 + 8192 * 27_648
    assert fits["sequences_of_tokens"]["8192"] == fits["left_for_caches_bytes"] // one
    assert fits["weights_fit"]
    # Packed experts fit, the same dequantized do not.
    assert not fits["weights_with_dense_experts_fit"]
    assert fits["margin_bytes"] == round(288 * 2**30 * 0.1)
    assert main(["models", "inspect", "kimi-k3", "--device-memory", "80GB", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["fits"]["weights_fit"]


@pytest.mark.parametrize("packed", [True, False])
def test_the_tensors_that_follow_from_a_configuration_are_those_in_the_files(tmp_path, packed):
    folder = write_tiny_kimi(tmp_path / "tiny", packed=packed)
    config = load_config(local_files(folder))
    stored = {name: t.shape for name, t in read_folder(folder).items()}
    expected = {name: t.shape for name, t in kimi_tensors(config, packed=packed).items()}
    assert stored.keys() == expected.keys()
    assert {n for n in stored if stored[n] != expected[n] and not n.endswith("A_log")} == set()
    facts = describe(local_files(folder), tp=2)
    assert facts["tensors"] == len(stored)
    assert facts["active_parameters"] < facts["parameters"]


@pytest.mark.parametrize(
    ("text", "linear", "message"),
    [
        ({"hidden_size": None}, None, "hidden_size is missing"),
        ({"kv_lora_rank": 0}, None, "kv_lora_rank must be at least 1"),
        ({"num_key_value_heads": 2}, None, "num_key_value_heads must equal"),
        ({"hidden_act": "gelu"}, None, "hidden_act 'gelu' is not supported; known: situ"),
        ({"topk_method": "greedy"}, None, "topk_method 'greedy' is not supported"),
        ({"num_experts_per_token": 9}, None, "num_experts_per_token must be between 1 and"),
        ({"num_expert_group": 3}, None, "num_expert_group 3 does not divide num_experts 8"),
        ({"num_expert_group": 2, "topk_group": 3}, None, "topk_group must be between 1"),
        ({}, {"full_attn_layers": [3, 5]}, "must name each of the layers 1 to 6 once"),
        ({}, {"full_attn_layers": [1, 3, 5, 6]}, "must name each of the layers 1 to 6 once"),
        ({"quantization_config": {"format": "int8"}}, None, "quantization_config.format 'int8'"),
        ({"attn_res_block_size": -1}, None, "attn_res_block_size"),
        ({"moe_intermediate_size": 0}, None, "moe_intermediate_size must be at least 1"),
        (PACKED | {"moe_intermediate_size": 48}, None, "moe_intermediate_size must be a multiple"),
        (PACKED | {"routed_expert_hidden_size": 40}, None, "routed_expert_hidden_size must be a"),
        (
            {"quantization_config": {**PACKED["quantization_config"], **EIGHT_BITS}},
            None,
            "config_groups.group_0.weights.num_bits must be 4, not 8",
        ),
        ({"mla_use_nope": False, "rope_scaling": {"type": "yarn"}}, None, "rope_scaling 'yarn'"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path, text, linear, message):
    with pytest.raises(WeightsError, match=message):
        read(tmp_path, config_of(linear, **text))


def test_all_codes_under_all_scales():
    """Exact in bfloat16, for every code and every scale that is a number."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    values = unpack(codes, scales, torch.float64)
    table = [*E2M1, *(-v for v in E2M1)]
    for s in (0, 1, 126, 127, 128, 200, 254):
        wanted = [table[n] * 2.0 ** (s - 127) for b in range(256) for n in (b & 15, b >> 4)]
        assert values[s].tolist() == wanted
    inside = values[2:253]
    assert torch.equal(inside, inside.to(torch.bfloat16).to(torch.float64))


def test_packing_gives_the_nearest_values_and_what_is_packed_stays():
    torch.manual_seed(0)
    weight = torch.randn(7, 96, dtype=torch.float64)
    packed, scale = pack(weight)
    assert (packed.shape, scale.shape) == ((7, 48), (7, 3))
    values = unpack(packed, scale, torch.float64)
    again = unpack(*pack(values), torch.float64)
    assert torch.equal(values, again)
    steps = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert ((weight - values).abs() <= steps).all()


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), "not fit"),
        (torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), "must be U8"),
        (
            torch.zeros(2, 16, dtype=torch.uint8),
            torch.full((2, 1), 255, dtype=torch.uint8),
            "w1.weight_scale: a scale is NaN",
        ),
    ],
)
def test_packed_tensors_that_are_wrong_are_named(packed, scale, message):
    with pytest.raises(WeightsError, match=message):
        unpack(packed, scale, torch.bfloat16, "w1.weight")


def test_heads_limit_the_ranks(tmp_path):
    config = read(tmp_path, config_of({"num_heads": 6}))
    with pytest.raises(ConfigError, match="kda_num_heads is 6"):
        config.check_tp(4)
