"""`describe`: what headers say about a model."""

from __future__ import annotations

from pathlib import Path

import pytest

import tinymodels
from interlock.errors import WeightsError
from interlock.models.inspect import describe
from interlock.weights.resolve import local_files


def test_gguf(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1")
    facts = describe(local_files(path))
    weights = tinymodels.tiny_weights(tinymodels.TinySpec())
    assert facts["parameters"] == sum(array.size for array in weights.values())
    matrices = [array for array in weights.values() if array.ndim == 2]
    assert facts["formats"]["Q4_1"] == {
        "tensors": len(matrices),
        "bytes": sum(array.size for array in matrices) // 32 * 20,
    }
    assert facts["formats"]["F32"]["tensors"] == 5
    assert facts["tensor_bytes"] == sum(entry["bytes"] for entry in facts["formats"].values())
    assert facts["file_bytes"] == path.stat().st_size
    assert facts["kv_bytes_per_token"] == {"bfloat16": 256, "float32": 512}
    assert (facts["context"], facts["chat_template"]) == (512, True)
    assert facts["architecture"] == facts["config"]["architecture"] == "LlamaForCausalLM"


def test_folder(tmp_path: Path) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "m", shards=2, chat_template=None)
    facts = describe(local_files(folder))
    weights = tinymodels.tiny_weights(tinymodels.TinySpec())
    assert facts["tensor_bytes"] == sum(array.nbytes for array in weights.values())
    assert facts["file_bytes"] > facts["tensor_bytes"]
    assert facts["chat_template"] is False


def test_damaged_file(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(WeightsError, match="truncated"):
        describe(local_files(path))
