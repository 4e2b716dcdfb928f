"""Prompts, configurations, the closed loop, turns and floors."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest

from interlock.bench.compare import (
    Contestant,
    Protocol,
    check_lengths,
    idle_plugins,
    measure,
    turns,
)
from interlock.bench.drive import EngineLoop
from interlock.bench.floors import dense_bytes, floors, prefill_flops
from interlock.bench.metrics import Trace
from interlock.bench.prompts import PromptSource, corpus
from interlock.bench.spec import Load, Target, parse_target
from interlock.errors import ConfigError
from interlock.weights.config import ModelConfig

WORDS = list(range(1000, 1100))


def load(concurrency: int = 2, requests: int = 5, output: int = 4) -> Load:
    return Load(concurrency, requests, prompt_tokens=8, output_tokens=output)


# -- prompts -----------------------------------------------------------------------------------


def test_corpus_is_prose_of_the_stated_size() -> None:
    text = corpus()
    assert 50_000 < len(text) < 70_000
    assert "BEATRICE" in text
    assert text.isascii()


def test_prompts_have_the_exact_length_and_differ_from_the_first_token() -> None:
    prompts = PromptSource(WORDS).take(50, 30)
    assert {len(p) for p in prompts} == {30}
    assert len({p[0] for p in prompts}) == 50


def test_prompts_longer_than_the_text_wrap_around() -> None:
    (prompt,) = PromptSource(WORDS).take(1, 250)
    assert len(prompt) == 250
    assert set(prompt) == set(WORDS)


def test_later_prompts_are_new_ones_and_the_seed_repeats_them() -> None:
    source = PromptSource(WORDS, seed=3)
    first, second = source.take(10, 20), source.take(10, 20)
    assert not {tuple(p) for p in first} & {tuple(p) for p in second}
    assert PromptSource(WORDS, seed=3).take(10, 20) == first
    assert PromptSource(WORDS, seed=4).take(10, 20) != first


def test_shared_prefix_is_the_same_tokens_in_front_of_all() -> None:
    prompts = PromptSource(WORDS, shared_prefix=12).take(20, 30)
    assert {tuple(p[:12]) for p in prompts} == {tuple(WORDS[:12])}
    assert len({p[12] for p in prompts}) == 20


def test_a_prefix_that_fills_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="--shared-prefix 30"):
        PromptSource(WORDS, shared_prefix=30).take(1, 30)


# -- configurations ----------------------------------------------------------------------------


BASE = Target(plugins=("a", "b"), flags={"engine.model": "m"}, sets=("engine.threads=2",))


def test_a_variant_keeps_the_base_and_changes_what_it_names() -> None:
    target = parse_target("plugins=none engine.dtype=float32", BASE)
    assert target.plugins == ()
    assert target.flags == BASE.flags
    assert target.sets == ("engine.threads=2", "engine.dtype=float32")


def test_settings_of_plugins_that_a_variant_leaves_out_go_too() -> None:
    base = attrs.evolve(BASE, flags={"a.k": 1, "b.k": 2, "engine.threads": 2})
    assert parse_target("plugins=b", base).flags == {"b.k": 2, "engine.threads": 2}
    assert parse_target("engine.threads=1", base).flags == base.flags


def test_a_url_loses_its_v1_and_keeps_its_key() -> None:
    target = parse_target("url=http://localhost:1/v1/ api_key=k model=m", BASE)
    assert (target.kind, target.url) == ("url", "http://localhost:1")
    assert (target.api_key, target.model) == ("k", "m")


def test_transformers_has_no_plugins() -> None:
    target = parse_target("transformers", BASE)
    assert (target.kind, target.plugins) == ("transformers", ())


@pytest.mark.parametrize(
    "text", ["", "transformer", "dtype=float32", "url=localhost:1", "url=http://x threads=2"]
)
def test_a_wrong_configuration_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--against"):
        parse_target(text, BASE)


# -- the closed loop ---------------------------------------------------------------------------


def test_loop_keeps_exactly_c_in_flight_and_finishes_all(engine: Any, clock: Any) -> None:
    traces = EngineLoop(engine, load(2, 5), clock).run([[1] * 8] * 5)
    assert engine.most_running == 2
    assert [t.output_tokens for t in traces] == [4] * 5
    assert traces[0].ttft == 1.0
    assert traces[0].tpot == 1.0
    assert traces[-1].start == 108.0


def test_loop_counts_several_tokens_of_one_step(engine: Any, clock: Any) -> None:
    engine.per_step = 3
    (trace,) = EngineLoop(engine, load(1, 1, output=7), clock).run([[1] * 8])
    assert trace.arrivals == [(101.0, 3.0), (102.0, 3.0), (103.0, 1.0)]
    assert trace.tpot == pytest.approx(2 / 4)


def test_loop_reports_a_failed_request_and_goes_on(engine: Any, clock: Any) -> None:
    engine.fail = {"bench-0"}
    traces = EngineLoop(engine, load(1, 2), clock).run([[1] * 8] * 2)
    assert [t.error for t in traces] == ["row failed", None]


# -- turns -------------------------------------------------------------------------------------


def test_two_configurations_alternate_abba() -> None:
    assert [turns(2, i) for i in range(4)] == [[0, 1], [1, 0], [1, 0], [0, 1]]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_configuration_runs_once_per_round_and_first_equally_often(count: int) -> None:
    rounds = [turns(count, i) for i in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    positions = [[order.index(c) for order in rounds] for c in range(count)]
    assert len({sum(p) for p in positions}) == 1


def test_measure_pairs_prompts_within_a_round_and_renews_them_after(fake_session: Any) -> None:
    first, second = fake_session(1.0), fake_session(2.0)
    log: list[Any] = []
    first.log = second.log = log
    pair = [Contestant(Target(label="a"), first), Contestant(Target(label="b"), second)]
    measure(pair, load(), PromptSource(WORDS), Protocol(repeats=2, warmup=1), print)
    assert log == [first, second, first, second, second, first]
    assert first.calls[0][0].output_tokens == 4
    assert len(first.calls[0][1]) == 2
    measured = [[prompts for _, prompts in s.calls[1:]] for s in (first, second)]
    assert measured[0] == measured[1]
    assert measured[0][0] != measured[0][1]
    assert [len(b) for b in first_bursts(pair)] == [2, 2]


def first_bursts(contestants: list[Contestant]) -> list[list[Any]]:
    return [c.bursts[0] for c in contestants]


def test_noisy_rounds_are_repeated_then_kept(fake_session: Any, monkeypatch: Any) -> None:
    shares = itertools.chain([0.5, 0.0, 0.5, 0.5, 0.5, 0.5])
    monkeypatch.setattr("interlock.bench.compare.OthersGauge.share", lambda _: next(shares))
    session, said = fake_session(1.0), []
    contestant = Contestant(Target(), session)
    protocol = Protocol(repeats=2, warmup=0, max_others=0.08)
    measure([contestant], load(), PromptSource(WORDS), protocol, said.append)
    assert [b.others_cpu for b in contestant.bursts[0]] == [0.0, 0.5]
    assert "repeat 1: other processes used 50% of the CPUs; again" in said[0]
    assert said[-1].endswith("kept, after several tries")


def test_wrong_lengths_make_a_request_fail() -> None:
    def checked(trace: Trace) -> str | None:
        check_lengths(trace, 8, load())
        return trace.error

    exact = [(1.0, 4.0)]
    assert checked(Trace(0, list(exact), 1, 8)) is None
    assert checked(Trace(0, list(exact), 1, 9)) == "counted 9 prompt tokens instead of 8"
    assert checked(Trace(0, [(1.0, 3.0)], 1, 8)) == "gave 3 tokens instead of 4"


@pytest.mark.parametrize(("moving", "idle"), [(True, []), (False, ["p"])])
def test_a_plugin_whose_counters_stand_still_is_named(
    fake_session: Any, moving: bool, idle: list[str]
) -> None:
    contestant = Contestant(Target(), fake_session(1.0, ["p"], moving))
    measure([contestant], load(), PromptSource(WORDS), Protocol(1, 0), print)
    assert idle_plugins(contestant) == idle


# -- floors ------------------------------------------------------------------------------------

SMOLLM = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)


def test_floors_of_smollm_are_those_of_the_written_calculation() -> None:
    one = Load(1, 1, prompt_tokens=1024, output_tokens=128)
    bound = floors(
        SMOLLM,
        one,
        dtype="bfloat16",
        kv_bytes_per_token=23040,
        bytes_per_s=32e9,
        flops_per_s=390e9,
    )
    assert bound.prefill_s == pytest.approx(0.65, abs=0.005)
    assert bound.decode_step_s == pytest.approx(9.19e-3, abs=2e-5)
    assert bound.burst_s == pytest.approx(1.82, abs=0.02)


def test_a_step_reads_every_matrix_once() -> None:
    assert dense_bytes(SMOLLM, "bfloat16") == pytest.approx(269.0e6, rel=1e-3)
    assert dense_bytes(SMOLLM, "float32") == 2 * dense_bytes(SMOLLM, "bfloat16")


def test_sixteen_requests_share_the_weights_but_not_the_prompts() -> None:
    rates: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_bytes_per_token": 23040,
        "bytes_per_s": 32e9,
        "flops_per_s": 390e9,
    }
    bound = floors(SMOLLM, Load(16, 16, 1024, 128), **rates)
    assert bound.burst_s == pytest.approx(13.1, abs=0.1)
    assert floors(SMOLLM, Load(16, 32, 1024, 128), **rates).burst_s == pytest.approx(
        2 * bound.burst_s
    )


def test_attention_makes_prefill_grow_faster_than_the_prompt() -> None:
    assert prefill_flops(SMOLLM, 2048) > 2 * prefill_flops(SMOLLM, 1024)
