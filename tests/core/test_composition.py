"""All subsets and orders of four plugins that do not know each other, against a solo run.

The workload has equal blocks under different parents, duplicates, prompts that end on a block
boundary, aborts and retries, and a pool small enough to preempt. The mutants at the end prove that
it would notice: each is a plugin with one typical mistake, and must be caught.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from compose import BLOCK, play
from interlock.cache import sources
from interlock.cache.ledger import Ledger
from interlock.engine.memory import Memory
from interlock.engine.request import SamplingParams
from interlock.engine.scheduler import Scheduler
from interlock.hookspec import hookimpl
from plugins_for_tests import (
    Base,
    LedgerCache,
    LookupDrafter,
    PrefixCache,
    RemoteSource,
    Rotates,
    StrideLimit,
)
from sim import SimRunner, greedy, tokens_of

NAMES = ("draft", "cache", "remote", "stride")
KINDS: dict[str, Callable[[SimRunner], Base]] = {
    "draft": lambda runner: LookupDrafter(),
    "cache": lambda runner: PrefixCache(),
    "remote": RemoteSource,
    "stride": lambda runner: StrideLimit(),
}
MOVES = {
    "draft": ("drafted_total", "accepted_total"),
    "cache": ("hit_tokens_total", "published_total"),
    "remote": ("loaded_tokens_total",),
    "stride": ("clipped_total",),
}


def made(names: Sequence[str], runner: SimRunner) -> dict[str, Base]:
    return {name: KINDS[name](runner) for name in names}


SUBSETS = [c for size in range(5) for c in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("num_blocks", [11, 64])
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "bare")
def test_every_subset_gives_the_tokens_of_a_solo_run_and_every_plugin_acts(names, num_blocks):
    totals = {name: dict.fromkeys(MOVES[name], 0) for name in names}
    for seed in range(6):
        runner = SimRunner(num_blocks, BLOCK)
        plugins = made(names, runner)
        play(plugins, runner, seed)
        for name, moves in totals.items():
            for counter in moves:
                moves[counter] += plugins[name].counts[counter]
    assert all(value > 0 for moves in totals.values() for value in moves.values()), totals


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="+".join)
def test_order_changes_speed_but_no_token(order):
    runner = SimRunner(12, BLOCK)
    play(made(order, runner), runner, seed=17)


def sampled(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=5, ignore_eos=True, frequency_penalty=0.5)


def biased(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, logprobs=2)


@pytest.mark.parametrize("make_params", [sampled, biased])
@pytest.mark.parametrize("seed", range(3))
def test_seeded_samples_and_reshaped_logits_are_the_same_with_and_without(seed, make_params):
    def outcome(names: Sequence[str], num_blocks: int) -> tuple[dict[str, tuple], int]:
        runner = SimRunner(num_blocks, BLOCK)
        plugins = {**made(names, runner), "rotates": Rotates()}
        outputs = play(plugins, runner, seed, make_params)
        ended = {
            name: (tokens_of(given), [p for output in given for p in output.logprobs or ()])
            for name, given in outputs.items()
            if given[-1].finish_reason == "length"
        }
        drafter = plugins.get("draft")
        return ended, drafter.counts["accepted_total"] if drafter else 0

    bare, _ = outcome((), 64)
    accepted = 0
    for num_blocks in (11, 64):
        full, drafts = outcome(NAMES, num_blocks)
        accepted += drafts
        both = bare.keys() & full.keys()
        assert len(both) > 8
        assert {name: full[name] for name in both} == {name: bare[name] for name in both}
    assert accepted > 0


# -- mutants: each has one typical mistake, and the workload above must show it ------------------


class PublishesDrafts(PrefixCache):
    """Publishes what was planned, drafts included, instead of what was accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: dict[str, int] = {}

    @hookimpl
    def interlock_chunk_limit(self):
        return self

    def clip(self, request, start, end):
        self.planned[request.id] = end
        return end

    def committed(self, request, stop):
        return min(max(stop, self.planned[request.id]), request.num_tokens)


class PublishesWhenScheduled(PrefixCache):
    """Publishes the whole prompt on admission, before anything was computed."""

    def settle(self, request, start, num_tokens):
        super().settle(request, start, num_tokens)
        full = len(request.block_table) * self.size
        for begin in range(0, min(full, request.num_tokens) // self.size * self.size, self.size):
            self.publish(request, begin, begin + self.size)


class ForgetsItsReference(PrefixCache):
    def take(self, block):
        pass

    def drop(self, block):
        pass


class KeepsItsReference(PrefixCache):
    def drop(self, block):
        self.counts["leaked"] += 1


class ForgetsTheParent(PrefixCache):
    """Looks blocks up by their own tokens."""

    def key(self, tokens):
        return tuple(tokens[-0:]) if not tokens else ()


class TakesInMatch(PrefixCache):
    """Takes its reference when it is asked, though it may be asked again."""

    def match(self, request, start, stop):
        match = super().match(request, start, stop)
        if match:
            self.pool.take(match.blocks)
        return match

    def settle(self, request, start, num_tokens):
        super().settle(request, start, num_tokens)
        first = start // self.size
        self.pool.drop(request.block_table[first : first + -(-num_tokens // self.size)])


class MatchesTooMuch(PrefixCache):
    """Ignores ``stop``, so that nothing would be left to compute."""

    def match(self, request, start, stop):
        return super().match(request, start, request.num_tokens)


class DoesNotHold(RemoteSource):
    def hold(self, request, name):
        pass


class WritesWithoutReferences(RemoteSource):
    """Relies on the request to keep the blocks alive until the transfer has ended."""

    def take(self, blocks):
        pass

    def drop(self, blocks):
        pass

    def held(self):
        return []


class ReusesItsHold(RemoteSource):
    """Names every hold alike: a stale transfer then releases the hold of a new admission."""

    def hold(self, request, name):
        request.hold("transfer")
        self.loads[-1].name = "transfer"


class LoadsFromZero(RemoteSource):
    """Assumes that no other source is before it."""

    def settle(self, request, start, num_tokens):
        super().settle(request, 0, num_tokens)


class DraftsInPlace(LookupDrafter):
    """Puts its drafts into the sequence, where everybody sees them before they are verified."""

    def propose(self, requests):
        drafts = super().propose(requests)
        for sequence, proposed in zip(requests, drafts, strict=True):
            if sequence.num_tokens + 1 < sequence.token_limit:
                sequence.token_ids += proposed[:1]
        return [[] for _ in requests]


MUTANTS = {
    PublishesDrafts: "cache",
    PublishesWhenScheduled: "cache",
    ForgetsItsReference: "cache",
    KeepsItsReference: "cache",
    ForgetsTheParent: "cache",
    TakesInMatch: "cache",
    MatchesTooMuch: "cache",
    DoesNotHold: "remote",
    WritesWithoutReferences: "remote",
    ReusesItsHold: "remote",
    LoadsFromZero: "remote",
    DraftsInPlace: "draft",
}


def failures(
    swap: dict[str, Callable[[SimRunner], Base]],
    seeds: Iterable[int],
    names: Sequence[str] = NAMES,
) -> Iterator[str]:
    """What the workload reports with all four plugins, some of them replaced by ``swap``."""
    for seed, num_blocks in itertools.product(seeds, (11, 64)):
        runner = SimRunner(num_blocks, BLOCK)
        plugins = {name: {**KINDS, **swap}[name](runner) for name in names}
        try:
            play(plugins, runner, seed)
        except Exception as error:
            yield f"seed {seed}, {num_blocks} blocks: {error!r}"


# A transfer this long is overtaken by preemptions and by new admissions of its request.
SLOW = 25
SEEDS = (13, 17, 18, 2, 5, 7)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_plugin_with_one_mistake_is_caught(mutant):
    remote = issubclass(mutant, RemoteSource)
    make = (lambda runner: mutant(runner, SLOW)) if remote else (lambda runner: mutant())
    assert any(failures({MUTANTS[mutant]: make}, SEEDS))


def test_the_same_workload_finds_nothing_wrong_with_slow_transfers():
    assert list(failures({"remote": lambda runner: RemoteSource(runner, SLOW)}, SEEDS)) == []


def test_a_cache_that_announces_through_the_ledger_composes_too():
    made = []

    def make(runner):
        made.append(LedgerCache())
        return made[-1]

    assert list(failures({"cache": make}, SEEDS)) == []
    totals = sum((cache.counts for cache in made), Counter())
    assert min(totals[f"{what}_total"] for what in ("published", "aborted", "hit_tokens")) > 0


# -- mutants of the core: what it owes to plugins ------------------------------------------------


def no_copy_before_write(monkeypatch):
    real = Memory.needs
    monkeypatch.setattr(Memory, "needs", lambda *args: real(*args)._replace(shared=[]))


def rejected_drafts_count_as_computed(monkeypatch):
    real = Scheduler._advance

    def advance(self, row, result):
        real(self, row, result)
        if not row.request.finished:
            row.request.num_computed_tokens = min(row.stop, row.request.num_tokens - 1)
            row.request.num_computed_tokens += len(row.draft_tokens) - len(result.accepted) + 1

    monkeypatch.setattr(Scheduler, "_advance", advance)


def gaps_in_the_block_table_are_closed(monkeypatch):
    real = sources.table

    def table(shares, block_size):
        blocks = real(shares, block_size)
        return sorted(blocks, key=lambda block: block is None)

    monkeypatch.setattr(sources, "table", table)


def reservations_survive_an_abort(monkeypatch):
    monkeypatch.setattr(Ledger, "abort", lambda self, owner: self.commit(owner, 10**9))


def later_sources_are_not_settled(monkeypatch):
    real = sources.chain

    def chain(given, request, block_size, **options):
        shares = real(given, request, block_size, **options)
        return [s for s in shares if s.match.num_tokens] or shares[:1]

    monkeypatch.setattr(sources, "chain", chain)


CORE_MUTANTS = {
    no_copy_before_write: {},
    rejected_drafts_count_as_computed: {},
    gaps_in_the_block_table_are_closed: {},
    reservations_survive_an_abort: {"cache": lambda runner: LedgerCache()},
    later_sources_are_not_settled: {},
}


@pytest.mark.parametrize("mutate", CORE_MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_core_with_one_mistake_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)
    orders = (NAMES, NAMES[::-1])
    assert any(found for names in orders for found in failures(CORE_MUTANTS[mutate], SEEDS, names))
