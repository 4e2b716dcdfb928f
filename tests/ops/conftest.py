from __future__ import annotations

import pytest
import torch

from interlock.ops import kernel_problem


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory from torch.empty is NaN, so that an element that nobody writes is seen."""
    empty = torch.empty

    def filled(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request):
    """A dtype that the kernels of this CPU can run in."""
    problem = kernel_problem(request.param)
    if problem is not None:
        pytest.skip(problem)
    return request.param
