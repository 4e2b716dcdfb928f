"""Folders of safetensors: shards, indexes, and everything that may be missing or damaged."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import tinymodels
from interlock.errors import WeightsError
from interlock.weights.safetensors_folder import SafetensorsSource
from interlock.weights.safetensors_header import read_file, read_folder

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tinymodels.write_tiny_hf(tmp_path / "model", shards=3)


@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors(tmp_path: Path, shards: int) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "model", shards=shards)
    expected = tinymodels.tiny_weights(tinymodels.TinySpec())
    with SafetensorsSource(folder) as source:
        assert set(source.infos) == set(expected)
        for name, array in expected.items():
            tensor = source.get(name)
            assert (tensor.info.shape, tensor.info.format) == (array.shape, "F32")
            assert torch.equal(tensor.dense(torch.float32), torch.from_numpy(array))
            assert tensor.blocks() is None


def test_dense_is_a_copy(tmp_path: Path) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "model")
    with SafetensorsSource(folder) as source:
        source.get("model.norm.weight").dense(torch.float32).zero_()
        assert source.get("model.norm.weight").dense(torch.float32).any()


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(WeightsError, match=f"1 of 3 weight files are missing: {SECOND}"):
        read_folder(sharded)


def test_folder_in_place_of_a_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / SECOND).mkdir()
    with pytest.raises(WeightsError, match="weight files are missing"):
        read_folder(sharded)


def test_tensor_that_only_the_index_has(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.9.ghost.weight"] = SECOND
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"absent: model\.layers\.9\.ghost\.weight"):
        read_folder(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "model', "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "names the file"),
        ('{"weight_map": {"a": 3}}', "names the file"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_index(sharded: Path, text: str, message: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=message):
        read_folder(sharded)


def test_empty_folder_and_folder_named_like_a_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \.safetensors file"):
        read_folder(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"x\.safetensors is not a regular file"):
        read_folder(tmp_path)


def test_truncation_at_many_sizes(tmp_path: Path) -> None:
    whole = (tinymodels.write_tiny_hf(tmp_path / "m") / "model.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    rng = random.Random(4)
    sizes = {*range(20), *range(0, len(whole), 8192), *rng.sample(range(len(whole)), 50)}
    for size in sizes:
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=f"truncated.*{size} bytes"):
            read_file(path)


def test_truncation_lists_tensors(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_hf(tmp_path / "m") / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 4])
    with pytest.raises(WeightsError, match=f"{size - 4} bytes, but its tensors need {size}; inc"):
        read_file(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}, "does not fit its data"),
        ({"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}, "does not fit its data"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "does not fit its data"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [2**60, 2**60 + 16]}, "truncated"),
        ({"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}, "unknown dtype 'F99'"),
        ({"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}, "malformed"),
        ({"dtype": "F32", "shape": [4]}, "malformed"),
        ([], "malformed"),
    ],
)
def test_malformed_entries(tmp_path: Path, entry: Any, message: str) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    with pytest.raises(WeightsError, match=message) as caught:
        read_file(path)
    assert "model.norm.weight" in str(caught.value)


def test_absurd_header_length(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(WeightsError, match="header of 9223372036854775808 bytes announced"):
        read_file(path)
    path.write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(WeightsError, match="its header is not JSON"):
        read_file(path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    header = json.dumps(
        {"model.norm.weight": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + b"\0" * 4
    )
    with (
        SafetensorsSource(tmp_path) as source,
        pytest.raises(WeightsError, match=r"'model\.norm\.weight' has dtype I8"),
    ):
        source.get("model.norm.weight")
