"""The hybrid ops against recurrences and formulas written out in float64."""

from __future__ import annotations

import random

import pytest
import torch

from interlock.engine.batch import Batch, Row
from interlock.engine.request import Request, SamplingParams
from interlock.ops import experts, kda, latent
from tolerances import close

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tokens(count, heads=2, size=16, seed=0, bound=-5.0):
    q, k, v, z = (draw(count, heads, size, seed=seed * 10 + i) for i in range(4))
    g = kda.kda_gate(z * 3, draw(heads, seed=7), draw(heads, size, seed=8), bound)
    beta = torch.sigmoid(draw(count, heads, seed=9))
    return kda.unit(q), kda.unit(k), v, g, beta


def recurrence(q, k, v, g, beta, state):
    """S <- diag(e^g) S; S <- S + beta k (v - S^T k)^T; o = S^T q, with loops and nothing else."""
    out, state = torch.empty_like(v), state.clone()
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s = state[h] * g[t, h].exp()[:, None]
            s = s + beta[t, h] * torch.outer(k[t, h], v[t, h] - s.T @ k[t, h])
            state[h], out[t, h] = s, s.T @ q[t, h]
    return out, state


@pytest.mark.parametrize("count", [*range(1, 36), 47, 48, 49, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunks_and_steps_are_the_recurrence(count, bound):
    values, start = tokens(count, bound=bound), draw(2, 16, 16, seed=3)
    wanted, end = recurrence(*values, start)
    out, last, _ = kda.kda_chunk(*values, start)
    close(out, wanted, F64)
    close(last, end, F64)
    stepped, states = kda.kda_recurrent(*(x[None] for x in values), start[None])
    close(stepped[0], wanted, F64)
    close(states[-1][0], end, F64)


def test_a_gate_without_bound_that_forgets_everything_does_not_overflow():
    q, k, v, g, beta = tokens(40)
    g = g - 1000.0
    out, state, _ = kda.kda_chunk(q, k, v, g, beta, draw(2, 16, 16))
    wanted, end = recurrence(q, k, v, g, beta, draw(2, 16, 16))
    close(out, wanted, F64)
    close(state, end, F64)


@pytest.mark.parametrize("seed", range(8))
def test_random_splits_of_a_row(seed):
    rng = random.Random(seed)
    values, start = tokens(200, seed=seed), draw(2, 16, 16, seed=3)
    whole, end, _ = kda.kda_chunk(*values, start)
    parts, state, begin = [], start, 0
    while begin < 200:
        stop = min(200, begin + rng.randint(1, 70))
        out, state, _ = kda.kda_chunk(*(x[begin:stop] for x in values), state)
        parts.append(out)
        begin = stop
    close(torch.cat(parts), whole, F64)
    close(state, end, F64)


@pytest.mark.parametrize("positions", [[16], [32, 48], [16, 32, 48, 64, 80, 96]])
def test_exports_are_the_states_of_the_prefixes(positions):
    values, start = tokens(100), draw(2, 16, 16, seed=3)
    plain, end, none = kda.kda_chunk(*values, start)
    out, last, exported = kda.kda_chunk(*values, start, positions)
    assert none == []
    assert torch.equal(out, plain)
    assert torch.equal(last, end)
    for position, state in zip(positions, exported, strict=True):
        close(state, recurrence(*(x[:position] for x in values), start)[1], F64)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_convolution(count):
    x, window, weight = draw(2, count, 6), draw(2, 3, 6, seed=1), draw(6, 4, seed=2)
    y, history = kda.causal_conv(x, window, weight)
    everything = torch.cat([window, x], 1)
    for t in range(count):
        taps = everything[:, t : t + 4]
        wanted = torch.nn.functional.silu((taps * weight.T).sum(1))
        close(y[:, t], wanted, F64)
    assert torch.equal(history, everything)


def test_gated_norm_and_residual_mix():
    x, gate, weight = draw(5, 2, 8), draw(5, 16, seed=1), draw(8, seed=2)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    close(kda.gated_norm(x, gate, weight, 1e-5), normed.flatten(1) / (1 + (-gate).exp()), F64)
    blocks, norm, row = draw(3, 5, 8), draw(8, seed=1), draw(8, seed=2)
    unit = blocks / (blocks.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    shares = ((unit * norm) @ row).softmax(0)
    wanted = sum(shares[i, :, None] * blocks[i] for i in range(3))
    close(kda.residual_mix(blocks, norm, row, 1e-5), wanted, F64)


# -- latent attention ------------------------------------------------------------------------------


def rows_of(*kinds):
    """Rows (tokens in this step, context, is_prefilling, drafts) over tables out of order."""
    rows, block = [], 40
    for index, (count, context, prefilling, drafts) in enumerate(kinds):
        request = Request(str(index), [1] * context, SamplingParams())
        needed = -(-context // 4)
        request.block_table = list(range(block - needed, block))[::-1]
        block -= needed
        rows.append(Row(request, context - count, count, [1] * drafts, 1, prefilling))
    return rows


def test_absorbed_and_plain_attention_are_the_same_and_read_nothing_else():
    heads, nope, rope, rank, value = 3, 8, 4, 6, 5
    cache = torch.full((40, 4, rank + rope), torch.nan, dtype=F64)
    k_up, v_up = draw(heads, nope, rank, seed=1), draw(heads, value, rank, seed=2)
    kinds = [
        (3, 17, False, 2),
        (1, 9, False, 0),
        (1, 16, False, 0),
        (7, 7, True, 0),
        (5, 30, True, 0),
    ]
    batch = Batch.build(rows_of(*kinds), 4, torch.device("cpu"))
    for row, (_, context, _, _) in enumerate(kinds):
        for position in range(context):
            block = batch.tables[row][position // 4]
            cache[block, position % 4] = draw(rank + rope, seed=row * 100 + position)
    q = draw(len(batch.token_ids), heads, nope + rope)
    out = latent.mla_attention(q, cache, k_up, v_up, batch, 0.3)
    start = 0
    for row, (count, context, _, _) in enumerate(kinds):
        held = torch.stack([draw(rank + rope, seed=row * 100 + p) for p in range(context)])
        for i in range(count):
            seen = held[: context - count + i + 1]
            for h in range(heads):
                keys = torch.cat([seen[:, :rank] @ k_up[h].T, seen[:, rank:]], 1)
                weights = (keys @ q[start + i, h] * 0.3).softmax(0)
                wanted = weights @ (seen[:, :rank] @ v_up[h].T)
                close(out[start + i].view(heads, value)[h], wanted, F64)
        start += count


def test_slot_minus_one_is_not_written():
    cache = torch.zeros(2, 4, 3)
    latent.latent_store(torch.ones(3, 3), cache, torch.tensor([5, -1, 0]))
    assert cache.view(-1, 3).any(1).tolist() == [i in (0, 5) for i in range(8)]


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(linear_beta):
    x = draw(7, 12) * 3
    gate, up = x.chunk(2, -1)
    bounded = up if linear_beta is None else 25 * (up / 25).tanh()
    wanted = 4 * (gate / 4).tanh() / (1 + (-gate).exp()) * bounded
    close(experts.situ_mul(x, 4.0, linear_beta), wanted, F64)


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_chooses_with_the_bias_and_weighs_without_it(sigmoid, renormalize):
    logits, bias = draw(9, 8), draw(8, seed=1)
    weights, ids = experts.route(
        logits, bias, 3, sigmoid=sigmoid, renormalize=renormalize, scaling=1.5
    )
    scores = torch.sigmoid(logits) if sigmoid else logits.softmax(-1)
    for row in range(9):
        best = sorted(range(8), key=lambda e, row=row: -float(scores[row, e] + bias[e]))[:3]
        assert sorted(ids[row].tolist()) == sorted(best)
        chosen = scores[row, ids[row]]
        wanted = 1.5 * (chosen / chosen.sum() if renormalize else chosen)
        close(weights[row], wanted, F64)


def test_routing_by_groups():
    logits = draw(20, 8)
    _, ids = experts.route(logits, torch.zeros(8, dtype=F64), 2, groups=4, top_groups=2)
    scores = torch.sigmoid(logits).view(20, 4, 2).sum(-1)
    for row in range(20):
        open_groups = scores[row].topk(2).indices.tolist()
        assert {int(e) // 2 for e in ids[row]} <= set(open_groups)


@pytest.mark.parametrize("beta", [4.0, None])
def test_experts_one_by_one(beta):
    x, w13, w2 = draw(6, 8), draw(5, 12, 8, seed=1), draw(5, 8, 6, seed=2)
    weights, ids = experts.route(draw(6, 5, seed=3), torch.zeros(5, dtype=F64), 2)
    out = experts.run_experts(x, w13, w2, weights, ids, beta, 25.0)
    for t in range(6):
        wanted = torch.zeros(8, dtype=F64)
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (w13[e] @ x[t]).chunk(2)
            if beta is None:
                inner = torch.nn.functional.silu(gate) * up
            else:
                inner = experts.situ_mul(torch.cat([gate, up])[None], beta, 25.0)[0]
            wanted += weight * (w2[e] @ inner)
        close(out[t], wanted, F64)
