"""A folder that `models quantize` wrote, loaded by transformers with compressed-tensors."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

import modelrun
from interlock.cli import main
from interlock.weights.packed_fp4 import unpack
from oracle.required import oracle
from tinymodels import write_tiny_hf

transformers = oracle("transformers")
oracle("compressed_tensors")


def test_compressed_tensors_loads_what_was_quantized(tmp_path):
    source, target = write_tiny_hf(tmp_path / "m"), tmp_path / "q"
    assert main(["models", "quantize", str(source), str(target), "--scope", "linear"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    ids = list(range(10, 42))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].double()
    ours = modelrun.logits(modelrun.load(target), ids)
    plain = modelrun.logits(modelrun.load(source), ids)
    # They compute in bfloat16, whose rounding is far below what quantizing changed.
    assert float((theirs - ours).norm() / ours.norm()) < 0.02
    assert float((ours - plain).norm() / plain.norm()) > 0.05
    stored = load_file(target / "model.safetensors")
    packed = [name.removesuffix("_packed") for name in stored if name.endswith("weight_packed")]
    assert len(packed) == 14
    for name in packed:
        found = model.get_parameter(name)
        wanted = unpack(stored[f"{name}_packed"], stored[f"{name}_scale"], torch.bfloat16)
        assert torch.equal(found, wanted), name
