"""On a GPU: the kernels as compiled there against their references, and an engine's tokens."""

from __future__ import annotations

import pytest
import torch

from interlock.extension import ExpertLayer
from interlock.layers.linear import RowKinds
from interlock.ops.experts import finalize_experts
from interlock.weights.packed_fp4 import pack
from interlock_mxfp4 import Mxfp4
from interlock_mxfp4.experts import TorchExperts
from k3nano.play import engine, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
CUDA = torch.device("cuda")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(dtype: torch.dtype) -> ExpertLayer:
    return ExpertLayer(
        name="l", num_experts=16, top=4, size=256, inner=192, activation=("situ", 4.0, 25.0),
        weight_format="MXFP4", dtype=dtype, device=CUDA, kinds=RowKinds(), batch_invariant=None,
        unfinalized_capacity=0,
    )  # fmt: skip


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_experts(activations, tokens):
    from interlock_mxfp4.gpu import TritonExperts

    shape = layer(torch.bfloat16)
    backends = [kind(shape, activations) for kind in (TritonExperts, TorchExperts)]
    for expert in range(16):
        gate_up, down = pack(draw(384, 256, seed=expert) / 16), pack(draw(256, 192, seed=99) / 16)
        for backend in backends:
            backend.put(expert, gate_up, down)
    x = draw(tokens, 256).to(torch.bfloat16).to(CUDA)
    ids = draw(tokens, 16, seed=1).topk(4).indices.sort(-1).values.to(CUDA)
    weights = draw(tokens, 4, seed=2).abs().to(CUDA)
    results = []
    for backend in backends:
        rows, row_map = backend.run(x, ids)
        results.append(backend.finalize(rows, weights, row_map))
    difference = (results[0] - results[1]).abs().max() / results[1].abs().max()
    assert float(difference) < {"bf16": 0.02, "mxfp8": 0.06}[activations]


def test_the_tail_is_bitwise_the_reference():
    from interlock_mxfp4.kernels import tail
    from interlock_mxfp4.kernels.reference import finalize_norm

    rows, row_map = draw(64, 3584), torch.randperm(64).view(4, 16).int()
    row_map[1, 3] = -1
    weights = draw(4, 16, seed=1).abs()
    given = [each.to(CUDA) for each in (rows, weights, row_map)]
    wanted = finalize_experts(rows, weights, row_map)
    assert torch.equal(tail.finalize_experts(*given).cpu(), wanted)
    norm = 1 + 0.1 * draw(3584, seed=2)
    found = tail.finalize_norm(*given, norm.to(CUDA), 1e-5).cpu()
    assert torch.allclose(found, finalize_norm(rows, weights, row_map, norm, 1e-5), rtol=1e-5)


def test_greedy_tokens_of_an_engine():
    """The same on the GPU with and without the plugin, but for near ties of the two best."""
    prompts = [[300, 301, 302, 303], [400] * 40]
    found = [
        run(engine("k3-nano", plugins, dtype="bfloat16", device="cuda"), prompts, 8)
        for plugins in ({}, {"mxfp4": Mxfp4()})
    ]
    pairs = [pair for x, y in zip(*found, strict=True) for pair in zip(x, y, strict=True)]
    assert sum(a == b for a, b in pairs) >= 12
