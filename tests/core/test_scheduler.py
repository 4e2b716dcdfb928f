"""The loop over a strict simulated runner: tokens must equal a solo run, and no block may leak."""

from __future__ import annotations

import random
import time

import pytest

from interlock.engine.request import SamplingParams
from interlock.errors import QueueFullError, RequestError
from interlock.extension import Match
from plugins_for_tests import PrefixCache, RemoteSource
from sim import SimRunner, expected_tokens, greedy, request, run, sim_engine, tokens_of


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("num_blocks", [14, 200])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_neighbours_chunks_and_preemption_never_change_tokens(chunk, num_blocks, block_size):
    runner = SimRunner(max(2, num_blocks * 4 // block_size), block_size)
    engine = sim_engine(runner, max_num_batched_tokens=chunk, max_num_seqs=8)
    wanted = {}
    for i, prompt in enumerate(prompts(16, seed=chunk, high=24)):
        engine.add(request(f"r{i}", prompt, greedy(3 + i % 9)))
        wanted[f"r{i}"] = expected_tokens(prompt, 3 + i % 9)
    got = {name: tokens_of(outputs) for name, outputs in run(engine).items()}
    assert got == wanted
    assert engine.scheduler.memory.pool.num_free == runner.geometry.num_blocks


@pytest.mark.parametrize("cached", [False, True])
def test_a_small_pool_preempts_and_recomputes(cached):
    plugins = {"cache": PrefixCache()} if cached else {}
    engine = sim_engine(SimRunner(num_blocks=10, block_size=4), plugins)
    for i in range(2):
        engine.add(request(f"r{i}", [i + 1, 2, 3], greedy(25)))
    outputs = run(engine, plugins=plugins)
    assert engine.stats().preemptions_total > 0
    for i in range(2):
        assert tokens_of(outputs[f"r{i}"]) == expected_tokens([i + 1, 2, 3], 25)
        assert outputs[f"r{i}"][-1].num_output_tokens == 25


def test_two_loads_whose_rest_does_not_fit_beside_each_other_both_complete():
    """Both are admitted for what is loaded; then one must be backed out for the other to go on."""

    class Partial(RemoteSource):
        def match(self, request, start, stop):
            return Match(max(0, min(stop, 12) - start))

    runner = SimRunner(num_blocks=16, block_size=4)
    plugins = {"remote": Partial(runner)}
    engine = sim_engine(runner, plugins, max_num_batched_tokens=8)
    given = {"a": [4] * 34, "b": [6] * 34}
    for name, prompt in given.items():
        engine.add(request(name, prompt, greedy(8)))
    engine.step()
    assert [r.num_computed_tokens for r in engine.scheduler.running] == [12, 12]
    outputs = run(engine, plugins=plugins)
    assert engine.stats().preemptions_total > 0
    for name, prompt in given.items():
        assert tokens_of(outputs[name]) == expected_tokens(prompt, 8)


def test_rows_are_laid_out_in_partition_order_and_decodes_are_not_delayed():
    runner = SimRunner(num_blocks=100)
    engine = sim_engine(runner, max_num_batched_tokens=16)
    engine.add(request("short", [1, 2], greedy(20)))
    engine.step()
    engine.add(request("long", list(range(60)), greedy(2)))
    for _ in range(3):
        engine.step()
        assert [name for name, *_ in runner.plans[-1]] == ["short", "long"]
    run(engine)


def test_priority_goes_first_and_equal_priority_in_order_of_arrival():
    runner = SimRunner(num_blocks=100)
    engine = sim_engine(runner, max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        engine.add(request(name, [1], greedy(1), priority=priority))
    order = list(run(engine))
    assert order == ["b", "d", "a", "c"]


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_next_is_served():
    engine = sim_engine(SimRunner(num_blocks=8, block_size=4, max_model_len=512))
    with pytest.raises(RequestError, match="KV cache 32 tokens") as error:
        engine.add(request("big", [1] * 50))
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "prompt"
    engine.add(request("small", [1, 2]))
    assert tokens_of(run(engine)["small"]) == expected_tokens([1, 2], 8)


def test_generation_ends_with_length_where_the_memory_ends():
    engine = sim_engine(SimRunner(num_blocks=8, block_size=4, max_model_len=512))
    engine.add(request("r", [5] * 20, greedy(400)))
    last = run(engine)["r"][-1]
    assert (last.finish_reason, last.num_output_tokens) == ("length", 12)


def test_an_empty_prompt_and_a_used_id_are_refused():
    engine = sim_engine()
    with pytest.raises(RequestError, match="no tokens"):
        engine.add(request("r", []))
    engine.add(request("r", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("r", [1]))
    run(engine)


@pytest.mark.parametrize("token", [-1, 64, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(RequestError, match="out of vocabulary"):
        sim_engine().add(request("r", [1, token]))


def test_the_waiting_queue_is_bounded():
    engine = sim_engine(max_waiting=3, max_num_seqs=1)
    for i in range(3):
        engine.add(request(f"r{i}", [1]))
    with pytest.raises(QueueFullError):
        engine.add(request("r3", [1]))
    assert len(run(engine)) == 3
    engine.add(request("r4", [1]))
    run(engine)


def test_the_waiting_queue_is_bounded_in_tokens():
    engine = sim_engine(max_waiting_tokens=10)
    engine.add(request("a", [1] * 8))
    with pytest.raises(QueueFullError, match="10"):
        engine.add(request("b", [1] * 3))
    run(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_at_any_point_ends_one_request_and_frees_its_blocks(steps):
    engine = sim_engine(max_num_batched_tokens=6)
    engine.add(request("gone", [1] * 10, greedy(50)))
    engine.add(request("stays", [2] * 10, greedy(6)))
    for _ in range(steps):
        engine.step()
    assert engine.abort("gone")
    outputs = run(engine)
    assert outputs["gone"][-1].finish_reason == "abort"
    assert outputs["stays"][-1].finish_reason == "length"
    assert not engine.abort("gone")
    assert engine.scheduler.memory.pool.usage == 0
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


def test_aborting_a_full_queue_ends_every_request_with_the_next_step():
    engine = sim_engine(max_num_seqs=1)
    for i in range(31):
        engine.add(request(f"r{i}", [1, 2], greedy(100)))
    engine.step()
    for i in range(31):
        assert engine.abort(f"r{i}")
    outputs = engine.step()
    assert sorted(o.request_id for o in outputs) == sorted(f"r{i}" for i in range(31))
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert not engine.has_work()
    assert engine.scheduler.memory.pool.usage == 0


def test_after_many_aborts_every_place_is_free_again():
    engine = sim_engine(max_num_seqs=8)
    for i in range(80):
        engine.add(request(f"r{i}", [1, 2, 3], greedy(30)))
        if i % 3 == 0:
            engine.step()
        engine.abort(f"r{i}")
    engine.add(request("last", [1, 2, 3], greedy(4)))
    assert tokens_of(run(engine)["last"]) == expected_tokens([1, 2, 3], 4)


def test_a_deadline_ends_a_request_with_timeout():
    engine = sim_engine()
    engine.add(request("late", [1], greedy(100), deadline=time.monotonic() - 1))
    engine.add(request("fine", [1], greedy(2)))
    outputs = run(engine)
    assert outputs["late"][-1].finish_reason == "timeout"
    assert outputs["fine"][-1].finish_reason == "length"


def test_held_requests_wait_and_an_overdue_hold_ends_with_an_error():
    engine = sim_engine()
    held = request("held", [1, 2], greedy(2))
    held.hold("loader")
    overdue = request("overdue", [1, 2], greedy(2))
    overdue.hold("loader", time.monotonic() - 1)
    engine.add(held)
    engine.add(overdue)
    outputs = {o.request_id: o for _ in range(3) for o in engine.step()}
    assert "held" not in outputs
    assert engine.stats().held == 1
    assert "loader did not deliver" in outputs["overdue"].error
    held.release("loader")
    assert tokens_of(run(engine)["held"]) == expected_tokens([1, 2], 2)


def test_nan_logits_end_one_row_only():
    runner = SimRunner()
    runner.nan.add("bad")
    engine = sim_engine(runner)
    for name in ("a", "bad", "b"):
        engine.add(request(name, [7, 8], greedy(4)))
    outputs = run(engine)
    assert "NaN" in outputs["bad"][-1].error
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == expected_tokens([7, 8], 4)


@pytest.mark.parametrize("late", [False, True])
def test_a_row_that_raises_in_forward_ends_alone(late):
    runner = SimRunner()
    engine = sim_engine(runner, max_num_batched_tokens=9)
    for name in ("a", "bad", "b"):
        engine.add(request(name, [len(name)] * 6 if name != "bad" else [3] * 20, greedy(6)))
    early = {}
    for _ in range(2 if late else 0):
        for output in engine.step():
            early.setdefault(output.request_id, []).append(output)
    runner.fail["bad"] = RuntimeError("chunk exploded")
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert "chunk exploded" in outputs["bad"][-1].error
    for name in ("a", "b"):
        got = tokens_of([*early.get(name, []), *outputs[name]])
        assert got == expected_tokens([len(name)] * 6, 6)


def test_many_poisoned_rows_do_not_kill_the_engine():
    runner = SimRunner(num_blocks=300)
    engine = sim_engine(runner, max_num_seqs=20)
    for i in range(20):
        engine.add(request(f"bad{i}", [1, 2], greedy(3)))
        runner.fail[f"bad{i}"] = ValueError("boom")
    engine.add(request("good", [1, 2], greedy(3)))
    outputs = run(engine)
    assert all(outputs[f"bad{i}"][-1].finish_reason == "error" for i in range(20))
    assert tokens_of(outputs["good"]) == expected_tokens([1, 2], 3)


def test_each_request_ends_exactly_once():
    engine = sim_engine(SimRunner(num_blocks=20))
    for i, prompt in enumerate(prompts(30, high=12)):
        engine.add(request(f"r{i}", prompt, greedy(1 + i % 5)))
        if i % 7 == 0:
            engine.abort(f"r{i}")
    outputs = run(engine)
    for name, given in outputs.items():
        assert [o.finish_reason is not None for o in given].count(True) == 1, name
        assert given[-1].finish_reason is not None


def test_max_tokens_zero_scores_the_prompt_and_generates_nothing():
    engine = sim_engine(max_num_batched_tokens=5)
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    engine.add(request("r", [1, 2, 3, 4, 5, 6, 7], params))
    (output,) = run(engine)["r"]
    assert (output.finish_reason, output.num_output_tokens) == ("length", 0)
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("num_blocks", [7, 60])
def test_prompt_logprobs_are_complete_after_chunks_and_preemption(num_blocks):
    tokens = list(range(10))
    whole = sim_engine(max_num_batched_tokens=64)
    whole.add(request("r", tokens, greedy(2, prompt_logprobs=3)))
    wanted = run(whole)["r"][0].prompt_logprobs
    engine = sim_engine(SimRunner(num_blocks=num_blocks), max_num_batched_tokens=3)
    for i in range(3):
        engine.add(request(f"r{i}", tokens, greedy(12, prompt_logprobs=3)))
    for outputs in run(engine).values():
        assert outputs[0].prompt_logprobs == wanted


def test_soak_of_random_arrivals_and_cancellations_leaks_nothing():
    rng = random.Random(3)
    engine = sim_engine(SimRunner(num_blocks=40), max_num_seqs=12, max_num_batched_tokens=24)
    given = prompts(120, seed=9, high=20)
    outputs: dict[str, list] = {}
    cancelled = set()
    todo = list(enumerate(given))
    while todo or engine.has_work():
        for i, prompt in todo[: rng.randint(0, 3)]:
            engine.add(request(f"r{i}", prompt, greedy(1 + i % 11)))
            todo.pop(0)
        if rng.random() < 0.2 and engine.scheduler.requests:
            name = rng.choice(list(engine.scheduler.requests))
            cancelled.add(name)
            engine.abort(name)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check()
    assert engine.scheduler.memory.pool.usage == 0
    for i, prompt in enumerate(given):
        if f"r{i}" not in cancelled:
            assert tokens_of(outputs[f"r{i}"]) == expected_tokens(prompt, 1 + i % 11)
