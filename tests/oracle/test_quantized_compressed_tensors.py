"""A folder that `models quantize` wrote, loaded by transformers with compressed-tensors."""

from __future__ import annotations

import torch

import modelrun
from interlock.cli import main
from oracle.required import oracle
from tinymodels import write_tiny_hf

transformers = oracle("transformers")
oracle("compressed_tensors")


def test_compressed_tensors_loads_what_was_quantized(tmp_path):
    source, target = write_tiny_hf(tmp_path / "m"), tmp_path / "q"
    assert main(["models", "quantize", str(source), str(target), "--scope", "linear"]) == 0
    # It dequantizes to bfloat16, which holds every value exactly.
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.nn.Module.float(model)
    ids = list(range(10, 42))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    ours = modelrun.logits(modelrun.load(target), ids)
    plain = modelrun.logits(modelrun.load(source), ids)
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-4
    # And it is the quantized model that both ran.
    assert float((ours - plain).abs().max() / plain.abs().max()) > 1e-3
