"""What hits, what is shared with whom, what is given back; on plain and hybrid simulated models."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsim import HybridRunner
from interlock.errors import RequestError
from interlock.extension import STATE_GRID
from interlock_prefix_cache.boundaries import MOST, cut, exportable, on_grid, wanted
from interlock_prefix_cache.hashing import Chain, child, root
from prefixcaching import Configured
from sim import SimRunner, expected_tokens, greedy, request, run, sim_engine, tokens_of

BLOCK = 4


class Bench:
    """An engine with the cache; `ask` runs one request and says how many tokens were cached."""

    def __init__(self, kind: str = "plain", blocks: int = 96, states: int = 24, **options) -> None:
        self.plugin = Configured(**options)
        hybrid = kind == "hybrid"
        self.runner = HybridRunner(blocks, BLOCK, states) if hybrid else SimRunner(blocks, BLOCK)
        self.engine = sim_engine(self.runner, {"prefix_cache": self.plugin})
        self._asked = 0

    def ask(self, prompt, count: int = 4, **fields) -> int:
        self._asked += 1
        asked = request(f"r{self._asked}", list(prompt), greedy(count))
        asked.extras = fields.get("extras", {})
        self.engine.add(asked)
        (outputs,) = run(self.engine, plugins={"prefix_cache": self.plugin}).values()
        assert outputs[-1].error is None, outputs[-1].error
        assert tokens_of(outputs) == expected_tokens(list(prompt), count)
        return max(output.num_cached_tokens for output in outputs)

    def answer(self, prompt, count: int = 4) -> list[int]:
        return [*prompt, *expected_tokens(list(prompt), count)]

    @property
    def counters(self):
        return self.plugin.interlock_counters()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + i * i) % 64 for i in range(length)]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33])
def test_a_repeated_prompt_hits_all_but_its_last_token(length):
    """Exact multiples of the block, one more and one less."""
    bench = Bench()
    assert bench.ask(prompt_of(length)) == 0
    assert bench.ask(prompt_of(length)) == length - 1


@pytest.mark.parametrize("length", [18, 31, 32, 33, 34, 48, 49, 60])
@pytest.mark.parametrize("mode", ["internal", "split"])
def test_a_hybrid_prompt_hits_its_last_state(length, mode):
    bench = Bench("hybrid", checkpoints=mode)
    assert bench.ask(prompt_of(length)) == 0
    unit = STATE_GRID if mode == "internal" else BLOCK
    assert bench.ask(prompt_of(length)) == (length - 1) // unit * unit


@pytest.mark.parametrize("mode", ["internal", "split", "off"])
@pytest.mark.parametrize("length", [5, 16, 21])
def test_the_next_turn_of_a_conversation_goes_on_from_the_answer(length, mode):
    bench = Bench("hybrid", checkpoints=mode)
    turn = prompt_of(length)
    bench.ask(turn, 6)
    # The last token of an answer was chosen, not computed.
    history = bench.answer(turn, 6)
    assert bench.ask([*history, 1, 2, 3]) == len(history) - 1


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_b_a(kind):
    bench = Bench(kind)
    a, b = prompt_of(40), prompt_of(40, seed=5)
    assert [bench.ask(p) for p in (a, b, a, b, a)][2:] == [{"plain": 39, "hybrid": 32}[kind]] * 3


def test_equal_blocks_under_other_parents_are_not_shared():
    bench = Bench()
    same = prompt_of(8, seed=9)
    bench.ask([1, 1, 1, 1, *same])
    assert bench.ask([2, 2, 2, 2, *same]) == 0


def test_a_block_is_shared_in_part_and_copied():
    bench = Bench()
    bench.ask([5, 6, 7, 8, 9, 10, 11, 12, 13])
    assert bench.ask([5, 6, 7, 8, 9, 10, 60, 61, 62]) == 6
    assert bench.counters["partial_hits_total"] == 1
    # The first one's block was copied, not written.
    assert bench.ask([5, 6, 7, 8, 9, 10, 11, 12, 13]) == 8


@pytest.mark.parametrize(("mode", "cached"), [("internal", 32), ("split", 40)])
def test_a_second_sharer_gets_a_state_at_the_junction(mode, cached):
    """The first lookup finds blocks without a state there; it leaves one for the next."""
    bench = Bench("hybrid", checkpoints=mode)
    common = prompt_of(40)
    bench.ask([*common, *prompt_of(30, seed=3)])
    assert bench.ask([*common, *prompt_of(30, seed=4)]) == 0
    assert bench.ask([*common, *prompt_of(30, seed=6)]) == cached


@pytest.mark.parametrize("interval", [16, 32])
def test_states_at_intervals(interval):
    bench = Bench("hybrid", interval=interval)
    bench.ask(prompt_of(100))
    shorter = [*prompt_of(100)[:90], 1, 2, 3]
    assert bench.ask(shorter) >= 80 // interval * interval


def test_concurrent_cold_prefills_of_one_prefix():
    bench = Bench("hybrid")
    for index in range(5):
        bench.engine.add(request(f"c{index}", prompt_of(50), greedy(4)))
    outputs = run(bench.engine, plugins={"prefix_cache": bench.plugin})
    for index in range(5):
        assert tokens_of(outputs[f"c{index}"]) == expected_tokens(prompt_of(50), 4)
    assert bench.ask(prompt_of(50)) == 48


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("steps", range(1, 6))
def test_abort_in_mid_prefill_and_retry(kind, steps):
    """vLLM 56525: what was only scheduled must be nobody's hit."""
    bench = Bench(kind)
    plugin = Configured(interval=16)
    small = sim_engine(bench.runner, {"prefix_cache": plugin}, max_num_batched_tokens=20)
    for attempt in range(3):
        small.add(request(f"a{attempt}", prompt_of(70), greedy(4)))
        for _ in range(steps):
            small.step()
        small.abort(f"a{attempt}")
        small.step()
    small.add(request("last", prompt_of(70), greedy(4)))
    outputs = run(small, plugins={"prefix_cache": plugin})
    assert tokens_of(outputs["last"]) == expected_tokens(prompt_of(70), 4)


def test_a_step_that_fails_publishes_nothing_and_keeps_no_slot():
    plugin = Configured(interval=16)
    runner = HybridRunner(96, BLOCK, 24)
    engine = sim_engine(runner, {"prefix_cache": plugin})
    original, failures = runner.forward, [2]

    def forward(plan):
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("the device is gone")
        return original(plan)

    runner.forward = forward
    engine.add(request("r", prompt_of(60), greedy(4)))
    engine.step()
    assert plugin.interlock_counters()["blocks_now"] == 0
    assert plugin.interlock_counters()["states_now"] == 0
    run(engine, plugins={"prefix_cache": plugin})


# -- isolation ---------------------------------------------------------------------------------


def test_a_salt_separates():
    """PFX-02: the same prompt under salts a, b, a and none; equal salts do share."""
    bench = Bench()
    salts = ["a", "b", "a", None, None, "b"]
    given_ = [{} if s is None else {"cache_salt": s} for s in salts]
    found = [bench.ask(prompt_of(20), extras=extras) for extras in given_]
    assert found == [0, 0, 19, 0, 19, 19]


def test_keys_are_tagged_and_length_delimited():
    """PFX-03."""
    names = {
        root([("salt", "S"), ("request", None)]), root([("salt", None), ("request", "S")]),
        root([("salt", "a"), ("request", "b")]), root([("salt", "ab"), ("request", "")]),
        root([("salt", ""), ("request", "ab")]), root([("salt", None), ("request", None)]),
    }  # fmt: skip
    assert len(names) == 6


def test_names_are_the_same_in_every_process():
    """PFX-05."""
    code = (
        "from interlock_prefix_cache.hashing import child, root\n"
        "print(child(root([('salt', 'x')]), [1, 2, 3, 70000]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert outputs == {child(root([("salt", "x")]), [1, 2, 3, 70000]).hex() + "\n"}


def test_a_request_can_stay_out():
    bench = Bench("hybrid")
    out = {"prefix_cache": {"enabled": False}}
    assert bench.ask(prompt_of(40), extras=out) == 0
    assert bench.counters["published_blocks_total"] == bench.counters["states_now"] == 0
    bench.ask(prompt_of(40))
    assert bench.ask(prompt_of(40), extras=out) == 0
    assert bench.ask(prompt_of(40)) == 32


@pytest.mark.parametrize("options", [{"enabled": 1}, {"enable": True}, "off", {"enabled": None}])
def test_options_that_cannot_be_are_refused_and_touch_nobody(options):
    bench = Bench()
    bad = request("bad", prompt_of(9), greedy(3))
    bad.extras = {"prefix_cache": options}
    with pytest.raises(RequestError, match=r"plugins.prefix_cache takes") as refused:
        bench.engine.add(bad)
    assert refused.value.param == "plugins.prefix_cache"
    bench.engine.add(request("good", prompt_of(9), greedy(3)))
    outputs = run(bench.engine, plugins={"prefix_cache": bench.plugin})
    assert set(outputs) == {"good"}
    assert tokens_of(outputs["good"]) == expected_tokens(prompt_of(9), 3)


# -- giving back -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_small_pool_evicts_what_was_used_longest_ago(kind):
    bench = Bench(kind, blocks=30, states=8)
    first, second = prompt_of(40), prompt_of(40, seed=2)
    bench.ask(first)
    bench.ask(second)
    bench.ask(first)
    bench.ask(prompt_of(40, seed=3))
    assert bench.counters["evicted_blocks_total"] > 0
    kept = bench.ask(first)
    assert kept == {"plain": 39, "hybrid": 32}[kind]
    assert bench.ask(second) < kept


def test_stress_then_the_same_prefix_again():
    """PFX-16: the damage that others do to a held prefix would show in its next answer."""
    bench = Bench("hybrid", blocks=60, states=10)
    prefix = prompt_of(33)
    for seed in range(1, 12):
        bench.ask([*prefix, *prompt_of(20, seed=seed)], 7)
        bench.ask(prefix)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=40), st.sampled_from(["plain", "hybrid"]))
def test_random_requests_over_a_tree_of_prefixes(choices, kind):
    """Tokens are always right, and nothing hits that no earlier request had in common."""
    bench = Bench(kind, blocks=70, states=12)
    seen: list[list[int]] = []
    for choice in choices[:14]:
        stem = prompt_of(10 + 12 * (choice % 4), seed=choice // 4 % 3)
        prompt = [*stem, *prompt_of(choice % 11, seed=choice % 5)] or [1]
        cached = bench.ask(prompt, 1 + choice % 4)
        longest = max((shared(prompt, each) for each in seen), default=0)
        assert cached <= min(longest, len(prompt) - 1)
        seen.append(bench.answer(prompt, 1 + choice % 4))


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_thousand_requests_over_a_small_tree(kind):
    """Twice over, for both kinds: right tokens, and hits just where a model of the cache allows.

    The model knows no blocks: a plain prompt can hit what it has in common with any former
    sequence, a hybrid one at most that. With memory for everything a plain one hits exactly that.
    """
    random, roomy = Random(7), Bench(kind, blocks=4000, states=400)
    tight = Bench(kind, blocks=48, states=9)
    seen: list[list[int]] = []
    asked = hit = 0
    for _ in range(500):
        stem = prompt_of(4 * random.randrange(1, 9), seed=random.randrange(3))
        prompt = [*stem, *prompt_of(random.randrange(1, 14), seed=random.randrange(9))]
        count = random.randrange(1, 5)
        most = min(max((shared(prompt, each) for each in seen), default=0), len(prompt) - 1)
        found = roomy.ask(prompt, count)
        assert found <= most
        if kind == "plain":
            assert found == most
        assert tight.ask(prompt, count) <= most
        asked, hit = asked + len(prompt), hit + found
        # The newest token of a sequence was chosen, not computed.
        seen.append(roomy.answer(prompt, count)[:-1])
    assert hit / asked > {"plain": 0.5, "hybrid": 0.1}[kind]


def shared(a, b) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


# -- pure functions ----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 200), st.integers(0, 600),
       st.one_of(st.none(), st.integers(16, 100)))  # fmt: skip
def test_every_position_that_is_wanted_can_be_exported(start, size, beyond, junction, interval):
    stop = start + size
    found = wanted(start, stop, stop + beyond, interval=interval, junction=junction)
    assert found == sorted(set(found))
    assert len(found) <= MOST
    for position in found:
        assert exportable(start, stop, position)
    if beyond == 0 and on_grid(start, stop - 1) > start:
        assert on_grid(start, stop - 1) in found


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 50), st.integers(1, 64))
def test_a_cut_is_at_the_last_block_boundary_that_can_hit(start, size, beyond, block):
    stop = start + size
    end = cut(start, stop, stop + beyond, block)
    assert start < end <= stop
    if end != stop:
        assert end % block == 0
        assert end < stop + beyond
        assert end + block >= stop + beyond


def test_a_chain_names_the_same_as_hashing_by_hand():
    tokens = list(range(100, 120))
    chain = Chain(root([]), 4)
    name = root([])
    for index in range(5):
        name = child(name, tokens[4 * index : 4 * index + 4])
        assert chain.name(index + 1, tokens) == name
    assert chain.name(2, tokens) == child(child(root([]), tokens[:4]), tokens[4:8])
