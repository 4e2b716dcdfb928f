"""Tensors of GGUF files: formats, the undone row permutation, raw blocks, names."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import tinymodels
from interlock.errors import WeightsError
from interlock.weights.config import load_config
from interlock.weights.config_gguf import hf_name
from interlock.weights.gguf_file import half_split_order
from interlock.weights.resolve import local_files
from interlock.weights.source import WeightSource, open_weights

Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
# Largest error of a format relative to the largest value of a row.
TOLERANCE = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3, "Q5_1": 0.05}
TOLERANCE |= {"Q5_0": 0.07, "Q4_1": 0.09, "Q4_0": 0.14}


def source(path: Path) -> WeightSource:
    files = local_files(path)
    return open_weights(files, load_config(files))


@pytest.mark.parametrize("quant", TOLERANCE)
def test_formats_round_trip(tmp_path: Path, quant: str) -> None:
    weights = tinymodels.tiny_weights(tinymodels.TinySpec())
    with source(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant=quant)) as opened:
        assert set(opened.infos) == set(weights)
        for name, expected in weights.items():
            tensor = opened.get(name)
            assert tensor.info.shape == expected.shape
            assert tensor.info.format == (quant if expected.ndim == 2 else "F32")
            actual = tensor.dense(torch.float64).numpy()
            peak = np.abs(expected).max(-1, keepdims=True)
            limit = TOLERANCE[quant] if expected.ndim == 2 else 0.0
            assert (np.abs(actual - expected) <= peak * limit).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dense_dtypes_and_ownership(tmp_path: Path, dtype: torch.dtype) -> None:
    with source(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")) as opened:
        first, second = opened.get(GATE).dense(dtype), opened.get(GATE).dense(dtype)
    assert first.dtype == dtype
    first.zero_()
    assert second.any()


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(tmp_path: Path, kind: str) -> None:
    """Random blocks with finite scales decode as the gguf library decodes them, in file order."""
    quant = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[quant][1]
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (96, block_bytes), dtype=np.uint8)
    scales = np.array([0.01, 0.02], np.float16).view(np.uint8)
    blocks[:, -2:] = scales[:2]
    blocks[:, :4] = scales if kind != "Q6_K" else blocks[:, :4]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    tinymodels._add_sizes(writer, tinymodels.TinySpec(hidden_size=256, head_dim=64))
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=quant)
    writer.add_tensor("blk.0.attn_q.weight", blocks[:64], raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with source(path) as opened:
        tensor = opened.get("model.embed_tokens.weight")
        expected = gguf.quants.dequantize(blocks, quant)
        assert tensor.info.shape == (96, 256)
        assert np.isfinite(expected).all()
        assert np.array_equal(tensor.dense(torch.float32).numpy(), expected)
        raw = opened.get(Q).blocks()
        assert raw is not None
        assert np.array_equal(raw.numpy(), blocks[:64])


def test_dequantizing_in_chunks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q5_1")
    with source(path) as opened:
        whole = opened.get(GATE).dense(torch.float32)
        monkeypatch.setattr("interlock.weights.gguf_file._CHUNK_ELEMENTS", 3 * 64)
        assert torch.equal(opened.get(GATE).dense(torch.float32), whole)


def test_blocks_are_rows_in_the_order_of_dense(tmp_path: Path) -> None:
    """The row permutation of llama's q and k applies to raw blocks as well."""
    with source(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")) as opened:
        for name in (Q, Q.replace("q_proj", "k_proj"), GATE):
            tensor = opened.get(name)
            raw = tensor.blocks()
            assert raw is not None
            assert raw.shape == (tensor.info.shape[0], tensor.info.shape[1] // 32 * 34)
            decoded = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert torch.equal(tensor.dense(torch.float32), torch.from_numpy(decoded))
        assert opened.get("model.norm.weight").blocks() is None


def test_only_llama_files_are_permuted(tmp_path: Path) -> None:
    spec = tinymodels.TinySpec(architecture="Qwen2ForCausalLM")
    expected = tinymodels.tiny_weights(spec)
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", architecture=spec.architecture)
    with source(path) as opened:
        for name in (Q, Q.replace("weight", "bias")):
            assert np.array_equal(opened.get(name).dense(torch.float32).numpy(), expected[name])


def test_permuted_biases(tmp_path: Path) -> None:
    expected = tinymodels.tiny_weights(tinymodels.TinySpec(attention_bias=True))
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", attention_bias=True)
    name = Q.replace("weight", "bias")
    with source(path) as opened:
        assert np.array_equal(opened.get(name).dense(torch.float32).numpy(), expected[name])
    assert load_config(local_files(path)).attention_output_bias


def test_half_split_order() -> None:
    assert half_split_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with pytest.raises(WeightsError, match="10 rows cannot be split into 4 heads"):
        half_split_order(10, 4)


def test_names() -> None:
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") is None
    assert hf_name("blk.x.attn_q.weight") is None


def test_unknown_tensors_are_listed(tmp_path: Path) -> None:
    extra = {"v.patch_embd.weight": np.zeros((4, 4), np.float32)}
    with source(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", extra=extra)) as opened:
        assert opened.unexpected == ("v.patch_embd.weight",)
        with pytest.raises(WeightsError, match="nothing"):
            opened.get("nothing")
