"""MXFP4 weights in every container: exact values, and errors that name the tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tinymodels
from interlock.errors import WeightsError
from interlock.weights.config import load_config
from interlock.weights.packed_fp4 import E2M1, decode, pack, unpack
from interlock.weights.resolve import local_files
from interlock.weights.safetensors_folder import SafetensorsSource
from interlock.weights.source import open_weights

TABLE = [*E2M1, *(-value for value in E2M1)]
GATE = "model.layers.0.mlp.gate_proj.weight"


def codes_and_scales(rows: int = 3, columns: int = 64, seed: int = 0):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    scale = torch.randint(110, 140, (rows, columns // 32), generator=random, dtype=torch.uint8)
    return codes, scale


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_code_under_every_scale(dtype):
    """Products of the element and the power of two, rounded to the dtype: nothing else."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    elements = torch.tensor([TABLE[n] for b in range(256) for n in (b & 15, b >> 4)]).double()
    wanted = elements[None] * 2.0 ** (torch.arange(255).double()[:, None] - 127)
    assert torch.equal(decode(codes, scales, dtype), wanted.to(dtype))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code(sign):
    """Each middle of two neighbours, held in place by a 6 in the same group."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.zeros(1, 32)
    row[0, :7] = sign * torch.tensor(middles)
    row[0, 31] = 6.0
    values = unpack(*pack(row), torch.float32)
    assert values[0, :7].abs().tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    just_above = row.clone()
    just_above[0, :7] *= 1 + 2**-20
    values = unpack(*pack(just_above), torch.float32)
    assert values[0, :7].abs().tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_each_value_is_the_nearest_under_its_scale():
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * 3
    codes, scale = pack(weight)
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    distance = (weight.double()[..., None] - factor[..., None] * torch.tensor(TABLE).double()).abs()
    found = (weight.double() - unpack(codes, scale, torch.float64)).abs()
    assert torch.equal(found, distance.amin(-1))


def test_a_scale_is_never_worse_than_its_neighbours():
    weight = torch.randn(50, 32, generator=torch.Generator().manual_seed(2))
    codes, scale = pack(weight)
    error = ((unpack(codes, scale, torch.float64) - weight.double()) ** 2).sum(1)
    for shift in (-1, 1):
        factor = torch.exp2(scale.double() + shift - 127)
        scaled = (weight.double() / factor)[..., None] - torch.tensor(TABLE).double()
        other = ((scaled.abs().amin(-1) * factor) ** 2).sum(1)
        assert (error <= other + 1e-12).all()


def test_zeros_extremes_and_what_has_no_code():
    assert not unpack(*pack(torch.zeros(2, 64)), torch.float64).any()
    tiny = torch.full((1, 32), 2.0**-130, dtype=torch.float64)
    assert not unpack(*pack(tiny), torch.float64).any()
    large = torch.full((1, 32), 6 * 2.0**120, dtype=torch.float64)
    assert torch.equal(unpack(*pack(large), torch.float64), large)
    for wrong, message in ((float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite")):
        with pytest.raises(WeightsError, match=f"w1.weight: .*{message}"):
            pack(torch.full((1, 32), wrong), "w1.weight")
    with pytest.raises(WeightsError, match=r"w1.weight: 40 inputs are no multiple of 32"):
        pack(torch.zeros(1, 40), "w1.weight")


def test_all_containers_give_the_same_matrix(tmp_path):
    """MXF-01: pairs in compressed-tensors and gpt-oss, halves of a block in GGUF."""
    spec = tinymodels.TinySpec(intermediate_size=64)
    rows, columns = spec.intermediate_size, spec.hidden_size
    codes, scale = codes_and_scales(rows, columns)
    wanted = decode(codes, scale, torch.float64)
    packed = {"w.weight_packed": codes, "w.weight_scale": scale}
    split = codes.view(rows, -1, 16)
    both = {"e_blocks": split[None].clone(), "e_scales": scale[None].clone()}
    with SafetensorsSource(folder(tmp_path / "hf", **packed, **both)) as source:
        assert set(source.infos) == {"w.weight", "e"}
        assert source.infos["w.weight"].shape == (rows, columns)
        assert source.infos["e"].shape == (1, rows, columns)
        for name in ("w.weight", "e"):
            tensor = source.get(name)
            assert tensor.info.format == "MXFP4"
            assert tensor.info.nbytes == codes.nbytes + scale.nbytes
            assert torch.equal(tensor.dense(torch.float64).view(rows, columns), wanted)
            assert all(map(torch.equal, tensor.packed(), (codes, scale)))
    raw = gguf_blocks(codes, scale)
    assert np.array_equal(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4), wanted)
    path = tmp_path / "m.gguf"
    write_gguf_with(path, raw, intermediate_size=64)
    files = local_files(path)
    with open_weights(files, load_config(files)) as source:
        tensor = source.get(GATE)
        assert tensor.info.format == "MXFP4"
        assert torch.equal(tensor.dense(torch.float64), wanted)
        assert all(map(torch.equal, tensor.packed(), (codes, scale)))


def gguf_blocks(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """ggml's block_mxfp4, written from its definition."""
    values = torch.stack([codes & 15, codes >> 4], -1).view(len(codes), -1, 32)
    body = values[..., :16] | values[..., 16:] << 4
    return torch.cat([scale[..., None], body], -1).flatten(1).numpy()


def write_gguf_with(path: Path, raw: np.ndarray, **spec: int) -> None:
    """A tiny model whose first gate is those blocks."""
    name, original = tinymodels.gguf_name(GATE), tinymodels._add_tensor

    def add(writer, tensor, array, quant):
        if tensor == name:
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(tensor, raw, raw_dtype=kind)
        else:
            original(writer, tensor, array, quant)

    tinymodels._add_tensor = add
    try:
        tinymodels.write_tiny_gguf(path, **spec)
    finally:
        tinymodels._add_tensor = original


def test_parts_are_whole_groups(tmp_path):
    codes, scale = codes_and_scales(6, 96)
    dense = decode(codes, scale, torch.float64)
    tensors = {"w.weight_packed": codes, "w.weight_scale": scale}
    with SafetensorsSource(folder(tmp_path / "hf", **tensors)) as source:
        tensor = source.get("w.weight")
        rows = tensor.part(0, 1, 4)
        assert torch.equal(decode(*rows.packed(), torch.float64), dense[1:4])
        both = rows.part(1, 32, 96)
        assert torch.equal(decode(*both.packed(), torch.float64), dense[1:4, 32:])
        assert torch.equal(both.dense(torch.float64), dense[1:4, 32:])
        assert tensor.part(1, 16, 48).packed() is None


GOOD = codes_and_scales()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w.weight_packed": GOOD[0]}, "w.weight_packed is missing its scales w.weight_scale"),
        (
            {"w.weight_packed": GOOD[0], "w.weight_scale": GOOD[1][:, :1].contiguous()},
            r"w.weight_packed \[3, 32\] does not fit w.weight_scale \[3, 1\]",
        ),
        (
            {"w.weight_packed": GOOD[0], "w.weight_scale": GOOD[1][:2].contiguous()},
            r"does not fit w.weight_scale \[2, 2\]: a scale belongs to 32 inputs, a byte to 2",
        ),
        (
            {"w.weight_packed": GOOD[0][:, :20].contiguous(), "w.weight_scale": GOOD[1]},
            r"w.weight_packed \[3, 20\] does not fit",
        ),
        (
            {"w.weight_packed": GOOD[0], "w.weight_scale": GOOD[1].view(torch.float8_e4m3fn)},
            r"w.weight_scale must be U8 \(E8M0\), not F8_E4M3",
        ),
        (
            {"e_blocks": GOOD[0].contiguous(), "e_scales": GOOD[1]},
            r"e_blocks \[3, 32\] does not fit e_scales",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_named_before_anything_is_read(tmp_path, tensors, message):
    with pytest.raises(WeightsError, match=message):
        SafetensorsSource(folder(tmp_path / "hf", **tensors))


def test_a_scale_that_is_nan_is_named(tmp_path):
    scale = GOOD[1].clone()
    scale[1, 1] = 255
    tensors = {"w.weight_packed": GOOD[0], "w.weight_scale": scale}
    with SafetensorsSource(folder(tmp_path / "hf", **tensors)) as source:
        for read in (
            source.get("w.weight").packed,
            lambda: source.get("w.weight").dense(torch.float32),
        ):
            with pytest.raises(WeightsError, match=r"w.weight_scale: a scale is NaN \(0xFF\)"):
                read()


def test_a_wrong_group_size_is_refused_by_the_configuration(tmp_path):
    weights = {"num_bits": 4, "group_size": 16, "type": "float", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    path = tinymodels.write_tiny_hf(tmp_path / "m", config={"quantization_config": quantization})
    with pytest.raises(WeightsError, match=r"group_0.weights.group_size must be 32, not 16"):
        load_config(local_files(path))


def test_other_quantizations_are_still_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "gptq"}}
    path = tinymodels.write_tiny_hf(tmp_path / "m", config=config)
    with pytest.raises(WeightsError, match="weights quantized with 'gptq' are not supported"):
        load_config(local_files(path))


def test_a_truncated_file_is_refused(tmp_path):
    path = folder(tmp_path / "hf", **{"w.weight_packed": GOOD[0], "w.weight_scale": GOOD[1]})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        SafetensorsSource(path)
