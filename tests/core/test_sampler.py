"""Sampling against independent formulas, distributions, and the promises about seeds."""

from __future__ import annotations

import math
import subprocess
import sys

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.engine import sampler
from interlock.engine.request import SamplingParams
from interlock.errors import RequestError
from sim import SimRunner, greedy, request, run, sim_engine, tokens_of


def params(**kw) -> SamplingParams:
    return SamplingParams(**kw)


def distribution(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Probabilities after the parameters, written the slow and obvious way."""
    probs = torch.softmax(logits.double() / p.temperature, -1)
    order = sorted(range(len(probs)), key=lambda i: -float(probs[i]))
    kept, mass = [], 0.0
    for place, i in enumerate(order):
        if p.top_k > 0 and place >= p.top_k:
            break
        if mass >= p.top_p and place > 0:
            break
        if float(probs[i]) < p.min_p * float(probs[order[0]]):
            break
        kept.append(i)
        mass += float(probs[i])
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.6, 1.0]),
)
def test_draw_follows_the_distribution(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = distribution(logits, p)
    counts = torch.zeros(40)
    grid = 400
    for i in range(grid):
        counts[sampler.draw(logits, p, (i + 0.5) / grid)] += 1
    # Equally spaced quantiles hit each token as often as its probability says, up to rounding.
    assert torch.all((counts / grid - wanted).abs() <= 1.5 / grid + 1e-6)
    assert torch.all(counts[wanted == 0] == 0)


def test_a_flat_distribution_is_sorted_whole_when_the_candidates_do_not_suffice():
    logits = torch.zeros(5000)
    logits[4321] = 0.5
    p = params(top_p=0.9)
    drawn = {sampler.draw(logits, p, (i + 0.5) / 3000) for i in range(3000)}
    assert len(drawn) > sampler.CANDIDATES


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(u):
    logits = torch.full((10,), -torch.inf)
    logits[[0, 4]] = 1.0
    assert sampler.draw(logits, params(), u) in (0, 4)
    logits[0] = -torch.inf
    assert sampler.draw(logits, params(), u) == 4


def test_uniform_is_a_fixed_function_and_looks_uniform():
    values = [sampler.uniform(123, i) for i in range(4000)]
    assert values == [sampler.uniform(123, i) for i in range(4000)]
    assert all(0 <= v < 1 for v in values)
    buckets = [sum(1 for v in values if int(v * 10) == b) for b in range(10)]
    chi = sum((b - 400) ** 2 / 400 for b in buckets)
    assert chi < 33.7  # 9 degrees of freedom, p = 1e-4
    assert sampler.uniform(124, 0) != sampler.uniform(123, 0)


def test_penalties_follow_their_definitions():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    p = params(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    sampler.reshape(logits, p, [0, 1, 3, 3], num_prompt_tokens=2)
    assert logits.tolist() == [1.0, -4.0, 1.0, 0.25 - 0.25 - 1.0]


def test_logit_bias_forces_and_bans():
    logits = torch.zeros(5)
    sampler.reshape(logits, params(logit_bias={1: -100, 2: 3.5}), [], 0)
    assert logits.tolist() == [0, -math.inf, 3.5, 0, 0]
    logits = torch.tensor([9.0, 0, 0, 0, 0])
    sampler.reshape(logits, params(logit_bias={3: 100}), [], 0)
    assert logits.argmax() == 3


def test_logprobs_are_those_of_the_model():
    logits = torch.tensor([1.0, 3.0, 2.0])
    entry = sampler.token_logprob(logits, 2, 2)
    wanted = torch.log_softmax(logits, -1)
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(float(wanted[2]))
    assert [t for t, _ in entry.top] == [1, 2]


def generate(prompt, p, neighbours=0, **engine):
    sim = sim_engine(SimRunner(num_blocks=engine.pop("num_blocks", 200)), **engine)
    sim.add(request("r", prompt, p))
    for i in range(neighbours):
        sim.add(request(f"n{i}", [i, i + 1], params(temperature=1.3, max_tokens=20)))
    return tokens_of(run(sim)["r"])


@pytest.mark.parametrize(
    "p",
    [
        params(seed=1, max_tokens=20),
        params(seed=2, max_tokens=20, temperature=2, top_k=5),
        params(seed=3, max_tokens=20, top_p=0.8, min_p=0.01, repetition_penalty=1.3),
    ],
)
def test_a_seed_gives_the_same_tokens_whatever_happens_around(p):
    alone = generate([1, 2, 3], p)
    assert len(alone) == 20
    assert generate([1, 2, 3], p, neighbours=7) == alone
    assert generate([1, 2, 3], p, neighbours=7, max_num_batched_tokens=3) == alone
    assert generate([1, 2, 3], p, neighbours=7, num_blocks=14) == alone
    assert generate([1, 2, 3], attrs.evolve(p, seed=99)) != alone


def test_choices_of_one_seed_differ_and_repeat():
    def choices():
        engine = sim_engine()
        for i in range(4):
            engine.add(request(f"c{i}", [1, 2], params(seed=1, max_tokens=16), stream=i))
        return [tokens_of(outputs) for _, outputs in sorted(run(engine).items())]

    first = choices()
    assert first == choices()
    assert len({tuple(tokens) for tokens in first}) == 4


def test_without_a_seed_equal_requests_differ():
    engine = sim_engine()
    for i in range(8):
        engine.add(request(f"c{i}", [1, 2], params(max_tokens=16)))
    assert len({tuple(tokens_of(o)) for o in run(engine).values()}) == 8


def test_a_restart_changes_unseeded_samples_and_keeps_seeded_ones():
    code = (
        "from interlock.engine.request import Request, SamplingParams as P\n"
        "print(*(Request('r', [1], P(seed=s)).rng_key for s in (None, 7)))"
    )
    keys = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        keys.append(done.stdout.split())
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


def test_greedy_and_sampled_rows_in_one_batch_follow_their_own_parameters():
    engine = sim_engine()
    engine.add(request("greedy", [1, 2], greedy(10)))
    engine.add(request("top1", [1, 2], params(max_tokens=10, temperature=2, top_k=1)))
    engine.add(request("nucleus", [1, 2], params(max_tokens=10, top_p=1e-6)))
    outputs = run(engine)
    alike = {tuple(tokens_of(outputs[name])) for name in ("greedy", "top1", "nucleus")}
    assert len(alike) == 1


def test_min_tokens_suppresses_stop_tokens_until_then():
    base = generate([4, 5], greedy(12))
    stop = base[2]
    stopped = generate([4, 5], greedy(12, stop_token_ids=(stop,)))
    assert stopped == base[: base.index(stop) + 1]
    longer = generate([4, 5], greedy(12, stop_token_ids=(stop,), min_tokens=8))
    assert len(longer) >= 8
    assert stop not in longer[:7]


def test_a_request_with_nothing_left_to_choose_ends_alone():
    engine = sim_engine()
    bans = dict.fromkeys(range(64), -100.0)
    engine.add(request("none", [1], params(logit_bias=bans, max_tokens=3)))
    engine.add(request("fine", [1], greedy(3)))
    outputs = run(engine)
    assert "no token is left" in outputs["none"][-1].error
    assert outputs["fine"][-1].finish_reason == "length"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_logprob_entries_match_the_tokens(reason):
    base = generate([4, 5], greedy(6))
    stop = (base[3],) if reason == "stop" else ()
    engine = sim_engine()
    engine.add(request("r", [4, 5], greedy(6, logprobs=2, stop_token_ids=stop)))
    outputs = run(engine)["r"]
    entries = [entry for o in outputs for entry in o.logprobs or []]
    assert outputs[-1].finish_reason == reason
    assert [e.token_id for e in entries] == tokens_of(outputs)
    assert len(entries) == outputs[-1].num_output_tokens
    assert all(e.rank == 1 and len(e.top) == 2 for e in entries)


BAD = [
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1),
    ("temperature", 2.01), ("top_p", -1.0), ("top_p", 1.01), ("top_k", -2), ("min_p", 2.0),
    ("repetition_penalty", 0.0), ("presence_penalty", 100.0), ("frequency_penalty", -2.1),
    ("max_tokens", -1), ("min_tokens", -1), ("logprobs", 21), ("prompt_logprobs", 10**6),
    ("seed", 2**63), ("stop", ("",)), ("stop", ("x",) * 17), ("stop_token_ids", (64,)),
    ("logit_bias", {64: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 1e30}),
    ("logit_bias", {1: math.nan}), ("allowed_token_ids", (-1,)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_values_out_of_range_name_their_field(field, value):
    with pytest.raises(RequestError) as error:
        params(**{field: value}).validate(64)
    assert field in (error.value.param or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("temperature", 2.0), ("top_p", 0.0), ("top_p", 1.0), ("top_k", -1),
     ("top_k", 0), ("top_k", 10**9), ("min_p", 1.0), ("logprobs", 20), ("seed", -(2**63))],
)  # fmt: skip
def test_boundary_values_work(field, value):
    assert len(generate([1], params(**{field: value, "max_tokens": 3}))) == 3
