"""The composition matrix once more on a model with recurrent states, and mutants of their rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from compose import BLOCK, play
from hybridsim import HybridRemote, HybridRunner, StateCache
from interlock.cache import sources
from interlock.engine import states
from interlock.engine.batch import Plan
from interlock.engine.memory import Memory
from interlock.errors import PluginError
from interlock.extension import Match
from plugins_for_tests import Base, LookupDrafter, PrefixCache, RemoteSource, StrideLimit
from sim import expected_tokens, greedy, request, run, sim_engine, tokens_of

NAMES = ("draft", "cache", "remote", "stride")
KINDS: dict[str, Callable[[HybridRunner], Base]] = {
    "draft": lambda runner: LookupDrafter(),
    "cache": lambda runner: StateCache(),
    "remote": HybridRemote,
    "stride": lambda runner: StrideLimit(),
}
MOVES = {
    "draft": ("drafted_total", "accepted_total"),
    "cache": ("hit_tokens_total", "exported_total"),
    "remote": ("loaded_tokens_total",),
    "stride": ("clipped_total",),
}
# Long enough for rows of more than one step of the export grid.
LONG = {"most": 12, "max_num_batched_tokens": 40}
SUBSETS = [c for size in range(5) for c in itertools.combinations(NAMES, size)]
# Too few blocks, too few states, and enough of both.
SIZES = [(18, 8), (64, 3), (96, 24)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "bare")
def test_every_subset_gives_the_tokens_of_a_solo_run(names, size):
    totals = {name: dict.fromkeys(MOVES[name], 0) for name in names}
    for seed in range(5):
        runner = HybridRunner(size[0], BLOCK, size[1])
        plugins = {name: KINDS[name](runner) for name in names}
        play(plugins, runner, seed, **LONG)
        for name, moves in totals.items():
            for counter in moves:
                moves[counter] += plugins[name].counts[counter]
    if size == SIZES[-1]:
        assert all(value > 0 for moves in totals.values() for value in moves.values()), totals


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="+".join)
def test_order_changes_no_token(order):
    runner = HybridRunner(20, BLOCK, 6)
    play({name: KINDS[name](runner) for name in order}, runner, 17, **LONG)


def test_states_limit_how_many_run_at_once():
    runner = HybridRunner(64, BLOCK, num_states=2)
    engine = sim_engine(runner)
    for i in range(5):
        engine.add(request(f"r{i}", [i + 1] * 5, greedy(6)))
    outputs = run(engine)
    assert max(len(plan) for plan in runner.plans) == 2
    assert engine.stats().preemptions_total == 0
    for i in range(5):
        assert tokens_of(outputs[f"r{i}"]) == expected_tokens([i + 1] * 5, 6)


@pytest.mark.parametrize("abort_after", [1, 2, 4])
def test_a_new_tenant_finds_no_trace_of_the_former_one(abort_after):
    """PFX-13: one slot, a request that is aborted in prefill or decode, then another one."""
    engine = sim_engine(HybridRunner(32, BLOCK, num_states=1), max_num_batched_tokens=6)
    engine.add(request("a", list(range(12)), greedy(20)))
    for _ in range(abort_after):
        engine.step()
    engine.abort("a")
    engine.add(request("b", [7, 8, 9], greedy(6)))
    assert tokens_of(run(engine)["b"]) == expected_tokens([7, 8, 9], 6)


class Fixed(LookupDrafter):
    """Drafts so many right tokens, and then wrong ones."""

    def __init__(self, right: int) -> None:
        super().__init__(slots=0)
        self.right = right

    def propose(self, requests):
        drafts = [expected_tokens(r.token_ids, 4) for r in requests]
        return [[*d[: self.right], *((t + 1) % 64 for t in d[self.right :])] for d in drafts]


@pytest.mark.parametrize("right", range(5))
def test_the_state_after_a_verify_row_is_that_of_the_accepted_tokens(right):
    """SPD-12: nothing accepted, everything accepted, and all between, in one batch."""
    runner = HybridRunner()
    engine = sim_engine(runner, {"fixed": Fixed(right)})
    for i in range(3):
        engine.add(request(f"r{i}", [i + 3] * 4, greedy(11)))
    outputs = run(engine)
    for i in range(3):
        assert tokens_of(outputs[f"r{i}"]) == expected_tokens([i + 3] * 4, 11)


def test_a_shared_state_is_copied_before_the_request_goes_on():
    cache = StateCache()
    runner = HybridRunner()
    engine = sim_engine(runner, {"cache": cache})
    engine.add(request("a", [1, 2, 3, 4, 5], greedy(4)))
    run(engine, plugins={"cache": cache})
    kept = {key: runner.states[slot] for key, slot in cache.kept.items()}
    for name in ("b", "c"):
        engine.add(request(name, [1, 2, 3, 4, 5], greedy(9)))
    outputs = {**run(engine, plugins={"cache": cache})}
    assert tokens_of(outputs["b"]) == tokens_of(outputs["c"])
    assert {key: runner.states[cache.kept[key]] for key in kept} == kept


@pytest.mark.parametrize("kind", [lambda _: PrefixCache(), RemoteSource], ids=["cache", "remote"])
def test_a_source_without_states_is_refused_at_start(kind):
    runner = HybridRunner()
    with pytest.raises(PluginError, match="'plain' supplies blocks but no recurrent states"):
        sim_engine(runner, {"plain": kind(runner)})


def test_blocks_without_their_state_fail_the_request_by_name():
    class Forgets(StateCache):
        def match(self, request, start, stop):
            found = super().match(request, start, stop)
            return found and found.__class__(found.num_tokens, found.blocks)

    forgets = Forgets()
    engine = sim_engine(HybridRunner(), {"forgets": forgets})
    tokens = [1, 2, 3, 4, 5]
    engine.add(request("a", tokens, greedy(4)))
    run(engine, plugins={"forgets": forgets})
    engine.add(request("b", [*tokens, *expected_tokens(tokens, 4)], greedy(4)))
    outputs = run(engine, plugins={"forgets": forgets})
    assert "'forgets'" in (outputs["b"][-1].error or "")


def test_a_request_whose_last_tokens_are_filled_in_shares_no_state():
    """Its source writes the state, which must not be one that somebody else relies on."""
    given = [Match(8, (1, 2), 5), Match(4), Match(0)]
    shares = [sources.Share("p", None, 0, match) for match in given]
    assert sources.state(shares) is None
    assert sources.state(shares[:1]) == 5
    assert sources.state([shares[0], shares[2]]) == 5
    assert sources.state([]) is None


@pytest.mark.parametrize("position", [0, 8, 15, 24, 32, 40])
def test_an_export_off_the_grid_fails_the_request_by_name(position):
    class Exports(StateCache):
        def plan(self, request, start, stop):
            return [(position, 0)]

    exports = Exports()
    engine = sim_engine(HybridRunner(), {"exports": exports})
    engine.add(request("a", list(range(32)), greedy(1)))
    outputs = run(engine, plugins={"exports": exports})
    assert "on a grid of 16" in (outputs["a"][-1].error or "")


# -- mutants -------------------------------------------------------------------------------------


class PublishesWhenPlanned(StateCache):
    """Shows an export before the step that writes it is complete."""

    def plan(self, request, start, stop):
        wanted = super().plan(request, start, stop)
        for position, slot in self.pending.pop(request.id, ()):
            self.keep(tuple(request.token_ids[:position]), slot)
        return wanted


class KeysTheStateWrongly(StateCache):
    """Files a state under one token too few."""

    def keep(self, key, slot):
        super().keep(key[:-1], slot)


class SharesWithoutReference(StateCache):
    """Files the final state without taking a reference, so that the slot gets a new owner."""

    def keep(self, key, slot):
        super().keep(key, slot)
        if self.kept.get(key) == slot and self.states.references(slot) > 1:
            self.states.drop([slot])


class FillsNoState(HybridRemote):
    """Transfers the blocks alone."""

    def complete(self, load):
        slot = self.slots[load.name]
        before = self.runner.states[slot]
        super().complete(load)
        self.runner.states[slot] = before


class FillsAFreedSlot(HybridRemote):
    """Relies on the request to keep its slot alive until the transfer has ended."""

    def hold(self, request, name):
        super().hold(request, name)
        self.states.drop([self.slots[name]])

    def held_states(self):
        return []

    def complete(self, load):
        slot = self.slots[load.name]
        if self.states.references(slot):
            self.states.take([slot])
            super().complete(load)


MUTANTS = {
    PublishesWhenPlanned: "cache",
    KeysTheStateWrongly: "cache",
    SharesWithoutReference: "cache",
    FillsNoState: "remote",
    FillsAFreedSlot: "remote",
}


def failures(
    swap: dict[str, Callable[[HybridRunner], Base]],
    seeds: Iterable[int] = (2, 5, 7, 13),
    names: Sequence[str] = NAMES,
) -> Iterator[str]:
    for seed, size in itertools.product(seeds, SIZES):
        runner = HybridRunner(size[0], BLOCK, size[1])
        plugins = {name: {**KINDS, **swap}[name](runner) for name in names}
        try:
            play(plugins, runner, seed, **LONG)
        except Exception as error:
            yield f"seed {seed}, {size}: {error!r}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_plugin_with_one_mistake_is_caught(mutant):
    remote = issubclass(mutant, HybridRemote)
    make = (lambda runner: mutant(runner, 25)) if remote else (lambda runner: mutant())
    assert any(failures({MUTANTS[mutant]: make}))


def test_slow_transfers_are_no_mistake():
    assert list(failures({"remote": lambda runner: HybridRemote(runner, 25)})) == []


def no_zeroing(monkeypatch):
    monkeypatch.setattr(Plan, "clears", property(lambda self: []))


def no_copy_of_shared_states(monkeypatch):
    real = Memory.needs
    monkeypatch.setattr(Memory, "needs", lambda *args: real(*args)._replace(state=0))


def rejected_drafts_stay_in_the_state(monkeypatch):
    monkeypatch.setattr(states, "_kept", lambda row, result: row.num_tokens)


CORE_MUTANTS = (
    no_zeroing,
    no_copy_of_shared_states,
    rejected_drafts_stay_in_the_state,
)


@pytest.mark.parametrize("mutate", CORE_MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_core_with_one_mistake_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)
    seeds = (2, 5, 7, 13, 17, 18)
    assert any(found for names in (NAMES, NAMES[::-1]) for found in failures({}, seeds, names))
