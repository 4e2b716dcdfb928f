"""KDA's ops against flash-linear-attention's naive versions, which run on a CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from interlock.ops import kda
from oracle.required import oracle
from tolerances import close

with warnings.catch_warnings():
    # It announces that there is no GPU.
    warnings.simplefilter("ignore")
    naive = oracle("fla.ops.kda.naive")
    gates = oracle("fla.ops.kda.gate")

H, K = 3, 32


def inputs(length: int, bound: float | None = -5.0):
    random = torch.Generator().manual_seed(length)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v = (draw(length, H, K) for _ in range(3))
    g = kda.kda_gate(draw(length, H, K) * 2, draw(H) * 0.3, draw(H, K), bound)
    return kda.unit(q), kda.unit(k), v, g, torch.sigmoid(draw(length, H)), draw(H, K, K)


def theirs(function, values, **options):
    """They compute in float32, and scale q themselves."""
    q, k, v, g, beta, state = (x.float()[None] for x in values)
    out, end = function(
        q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True, **options
    )
    return out[0], end[0]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 128, 200, 300])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_recurrence_and_chunks(length, bound):
    values = inputs(length, bound)
    wanted, end = theirs(naive.naive_recurrent_kda, values)
    q, k, v, g, beta, state = values
    out, last, _ = kda.kda_chunk(q, k, v, g, beta, state)
    close(out, wanted, torch.float32)
    close(last, end, torch.float32)
    rows = [x[None] for x in values[:5]]
    stepped, states = kda.kda_recurrent(*rows, state[None])
    close(stepped[0], wanted, torch.float32)
    close(states[-1][0], end, torch.float32)


@pytest.mark.parametrize("length", [64, 128, 192])
def test_their_chunks(length):
    values = inputs(length)
    wanted, end = theirs(naive.naive_chunk_kda, values, chunk_size=64)
    out, last, _ = kda.kda_chunk(*values[:5], values[5])
    close(out, wanted, torch.float32)
    close(last, end, torch.float32)


def test_gates():
    random = torch.Generator().manual_seed(1)
    z = torch.randn(20, H, K, generator=random) * 3
    rate, bias = torch.randn(H, generator=random), torch.randn(H, K, generator=random)
    wanted = gates.naive_kda_lowerbound_gate(z, rate, bias.flatten(), lower_bound=-5.0)
    close(kda.kda_gate(z, rate, bias, -5.0), wanted, torch.float32)
    close(
        kda.kda_gate(z, rate, bias, None),
        gates.naive_kda_gate(z, rate, bias.flatten()),
        torch.float32,
    )
