"""The whole hybrid model with Kimi-Linear's switches against transformers' own implementation."""

from __future__ import annotations

import pytest
import torch

import modelrun
from oracle.required import oracle
from tinykimi import write_tiny_kimi_linear
from tolerances import close

transformers = oracle("transformers")
LENGTHS = (1, 5, 63, 64, 65, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # What both leave at its default must be the same: transformers' norms inside MLA use 1e-6.
    return write_tiny_kimi_linear(tmp_path_factory.mktemp("kimi") / "linear")


@pytest.fixture(scope="module")
def theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(folder, theirs, length):
    ids = torch.randint(3, 290, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        wanted = theirs(ids).logits[0]
    model = modelrun.load(folder, torch.float32)
    found = modelrun.logits(model, ids[0].tolist())
    close(found, wanted, torch.float32)
    close(modelrun.logits(model, ids[0].tolist(), chunk=7), wanted, torch.float32)
