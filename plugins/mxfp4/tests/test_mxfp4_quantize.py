"""`interlock models quantize`: what it writes, what it keeps, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import modelrun
from interlock.cli import main
from interlock.tokenizer import Tokenizer
from interlock.weights.chat_template import find_template
from interlock.weights.config import load_config
from interlock.weights.packed_fp4 import decode, pack
from interlock.weights.resolve import local_files
from interlock_mxfp4 import quantize as module
from tinykimi import write_tiny_kimi
from tinymodels import write_tiny_gguf, write_tiny_hf

Q = "model.layers.0.self_attn.q_proj"


def quantize(*arguments: str) -> int:
    return main(["models", "quantize", *map(str, arguments)])


def test_matrices_are_packed_and_everything_else_is_kept(tmp_path, capsys):
    source, target = write_tiny_hf(tmp_path / "m"), tmp_path / "q"
    assert quantize(source, target) == 0
    out = capsys.readouterr().out
    assert f"{Q}.weight" in out
    assert f"wrote {target}" in out
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    codes, scale = pack(before[f"{Q}.weight"])
    assert torch.equal(after[f"{Q}.weight_packed"], codes)
    assert torch.equal(after[f"{Q}.weight_scale"], scale)
    assert f"{Q}.weight" not in after
    kept = [name for name in before if name in after]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(kept)
    for name in kept:
        assert torch.equal(after[name], before[name])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["m", "q"] or not list(
        tmp_path.glob(".*partial")
    )


def test_the_configuration_says_how(tmp_path):
    source, target = write_tiny_hf(tmp_path / "m"), tmp_path / "q"
    assert quantize(source, target, "--ignore", "k_proj", "--ignore", "lm_head") == 0
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == (
        "compressed-tensors",
        "mxfp4-pack-quantized",
    )
    assert config["quantization_status"] == "compressed"
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["type"], weights["group_size"]) == (4, "float", 32)
    assert "lm_head" in config["ignore"]
    assert {n for n in config["ignore"] if "proj" in n} == {
        f"model.layers.{i}.self_attn.k_proj" for i in range(2)
    }
    model = modelrun.load(target)
    assert model.num_parameters == modelrun.load(source).num_parameters


@pytest.mark.parametrize(
    ("scope", "experts", "linear"), [("experts", True, False), ("linear", False, True)]
)
def test_scopes(tmp_path, scope, experts, linear):
    source = write_tiny_kimi(tmp_path / "m", packed=False)
    assert quantize(source, tmp_path / "q", "--scope", scope) == 0
    names = load_file(tmp_path / "q" / "model.safetensors")
    root = "language_model.model.layers.1"
    expert = f"{root}.block_sparse_moe.experts.0.w1.weight_packed"
    shared = f"{root}.block_sparse_moe.shared_experts.gate_proj.weight_packed"
    assert ((expert in names), (shared in names)) == (experts, linear)
    assert f"{root}.block_sparse_moe.gate.weight" in names
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "quantization_config" in config["text_config"]


def test_what_is_packed_already_stays_as_it_is(tmp_path):
    source = write_tiny_kimi(tmp_path / "m", packed=True)
    assert quantize(source, tmp_path / "q", "--scope", "all") == 0
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("m", "q"))
    for name in (n for n in before if ".experts." in n and "shared" not in n):
        assert torch.equal(before[name], after[name])


def test_a_gguf_file_becomes_a_folder(tmp_path):
    source = write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    assert quantize(source, tmp_path / "q", "--scope", "linear") == 0
    files = [local_files(source), local_files(tmp_path / "q")]
    first, second = map(Tokenizer.load, files)
    text = "hello world, the cat sat\n\n  on 123 mats"
    assert first.encode(text) == second.encode(text)
    assert first.eos_token_ids == second.eos_token_ids
    assert find_template(files[0]) == find_template(files[1])
    a, b = map(load_config, files)
    for name in ("hidden_size", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(a, name) == pytest.approx(getattr(b, name))
    ids = list(range(10, 40))
    found = modelrun.logits(modelrun.load(tmp_path / "q"), ids)
    near = modelrun.logits(modelrun.load(source), ids)
    assert float((found - near).norm() / near.norm()) < 0.5


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    source = write_tiny_hf(tmp_path / "m")
    assert quantize(source, tmp_path / "q") == 0
    files = sorted(path.name for path in (tmp_path / "q").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    monkeypatch.undo()
    assert quantize(source, tmp_path / "whole") == 0
    ids = list(range(10, 40))
    assert torch.equal(
        modelrun.logits(modelrun.load(tmp_path / "q"), ids),
        modelrun.logits(modelrun.load(tmp_path / "whole"), ids),
    )


def test_the_report_is_the_error_of_each_weight(tmp_path, capsys):
    source = write_tiny_hf(tmp_path / "m")
    assert quantize(source, tmp_path / "q", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    weight = load_file(source / "model.safetensors")[f"{Q}.weight"]
    difference = weight - decode(*pack(weight), torch.float32)
    row = rows[f"{Q}.weight"]
    assert row["relative_error"] == pytest.approx(float(difference.norm() / weight.norm()))
    assert row["largest_error"] == pytest.approx(float(difference.abs().max()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scope", "experts"], "--scope experts: no matrix of m is quantized by that"),
        (["--ignore", "("], "--ignore '(' is no regular expression"),
        (["--format", "int3"], "--format int3: no such format is installed; installed: mxfp4"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys, arguments, message):
    source = write_tiny_hf(tmp_path / "m")
    assert quantize(source, tmp_path / "q", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_nothing_is_overwritten(tmp_path, capsys):
    source = write_tiny_hf(tmp_path / "m")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine.txt").write_text("x")
    assert quantize(source, tmp_path / "q") == 2
    assert "exists and is no empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["mine.txt"]


def test_a_weight_that_has_no_code_is_named(tmp_path, capsys):
    import numpy as np

    bad = {f"{Q}.weight": np.full((64, 64), np.nan, dtype=np.float32)}
    source = write_tiny_hf(tmp_path / "m", drop=[f"{Q}.weight"], extra=bad)
    assert quantize(source, tmp_path / "q") == 1
    assert f"{Q}.weight: a weight is NaN or infinite" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()
