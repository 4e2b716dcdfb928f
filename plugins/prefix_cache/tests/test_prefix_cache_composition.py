"""The composition matrix with the real cache, on plain and on hybrid models, and its mutants."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from compose import BLOCK, play
from hybridsim import HybridRemote, HybridRunner
from interlock_prefix_cache.index import Index
from interlock_prefix_cache.source import Cache
from plugins_for_tests import LookupDrafter, RemoteSource, StrideLimit
from prefixcaching import Configured
from sim import SimRunner

OTHERS: dict[str, Callable] = {
    "draft": lambda runner: LookupDrafter(),
    "remote": lambda runner: (HybridRemote if isinstance(runner, HybridRunner) else RemoteSource)(
        runner
    ),
    "stride": lambda runner: StrideLimit(),
}
SUBSETS = [c for size in range(4) for c in itertools.combinations(OTHERS, size)]
LONG = {"most": 12, "max_num_batched_tokens": 40}
MODES = ("internal", "split", "off")


def runner_of(kind: str, size: tuple[int, int]):
    return SimRunner(size[0], BLOCK) if kind == "plain" else HybridRunner(size[0], BLOCK, size[1])


@pytest.mark.parametrize(("kind", "mode"), [("plain", "internal"), *(("hybrid", m) for m in MODES)])
@pytest.mark.parametrize("size", [(18, 8), (64, 3), (96, 24)], ids=str)
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "alone")
def test_every_subset_gives_the_tokens_of_a_solo_run(names, size, kind, mode):
    totals = dict.fromkeys(("hit_tokens_total", "published_blocks_total"), 0)
    exported = 0
    for seed in range(4):
        runner = runner_of(kind, size)
        cache = Configured(checkpoints=mode)
        plugins = {"cache": cache, **{name: OTHERS[name](runner) for name in names}}
        play(plugins, runner, seed, **LONG)
        for name in totals:
            totals[name] += cache.counts[name]
        exported += cache.counts["exported_states_total"]
    if size == (96, 24):
        assert all(totals.values()), totals
        assert (exported > 0) == (kind == "hybrid" and mode == "internal")


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("order", list(itertools.permutations(("cache", *OTHERS))), ids="+".join)
def test_order_changes_no_token(order, kind):
    runner = runner_of(kind, (20, 6))
    makers = {"cache": lambda _: Configured(interval=16), **OTHERS}
    play({name: makers[name](runner) for name in order}, runner, 17, **LONG)


# -- mutants: each must be found by the workload -----------------------------------------------


def publishes_when_planned(monkeypatch):
    """States become hits before the step that writes them has run."""
    original = Cache.plan

    def plan(self, request, start, stop):
        exports = original(self, request, start, stop)
        for position, slot in self._exported.pop(request.id, []):
            self._publish_blocks(request, position)
            self._publish_state(request, position, slot)
        return exports

    monkeypatch.setattr(Cache, "plan", plan)


def publishes_blocks_on_admission(monkeypatch):
    original = Cache.settle

    def settle(self, request, start, num_tokens):
        original(self, request, start, num_tokens)
        self._publish_blocks(request, min(request.num_tokens - 1, len(request.block_table) * BLOCK))

    monkeypatch.setattr(Cache, "settle", settle)


def hashes_without_parent(monkeypatch):
    from interlock_prefix_cache import hashing, index

    def child(parent, tokens):
        return hashing.xxhash.xxh3_128_digest(hashing.array("q", tokens).tobytes())

    monkeypatch.setattr(hashing, "child", child)
    monkeypatch.setattr(index, "child", child)


def wrong_block_size(monkeypatch):
    original = Cache.__init__

    def init(self, engine, settings):
        original(self, engine, settings)
        self._size = BLOCK * 2

    monkeypatch.setattr(Cache, "__init__", init)


def names_another_boundary(monkeypatch):
    """A state is filed under the block boundary behind the position that was exported."""
    original = Cache._publish_state

    def publish(self, request, position, slot):
        original(self, request, -(-position // BLOCK) * BLOCK + BLOCK, slot)

    monkeypatch.setattr(Cache, "_publish_state", publish)


def forgets_its_references(monkeypatch):
    original = Index.add_block

    def add(self, parent, tokens, block):
        added = original(self, parent, tokens, block)
        if added:
            self._blocks.drop([block])
        return added

    monkeypatch.setattr(Index, "add_block", add)


def state_without_its_tail(monkeypatch):
    """The tokens behind the last whole block are not looked at."""
    original = Index.state_after

    def state_after(self, name, tokens):
        found = original(self, name, tokens)
        others = self._states.get(name, {}).values()
        return found or next((s for s in others if len(s.tail) <= len(tokens)), None)

    monkeypatch.setattr(Index, "state_after", state_after)


MUTANTS = {
    "plain": [publishes_blocks_on_admission, hashes_without_parent, wrong_block_size,
              forgets_its_references],
    "hybrid": [publishes_when_planned, publishes_blocks_on_admission, hashes_without_parent,
               wrong_block_size, names_another_boundary, forgets_its_references,
               state_without_its_tail],
}  # fmt: skip
CASES = [(kind, mutant) for kind, mutants in MUTANTS.items() for mutant in mutants]


@pytest.mark.parametrize(("kind", "mutant"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_mutants_are_found(kind, mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - any way of noticing will do
        for seed in range(25):
            for size in ((18, 8), (64, 4), (96, 24)):
                runner = runner_of(kind, size)
                plugins = {"cache": Configured(), "draft": LookupDrafter()}
                play(plugins, runner, seed, **LONG)
