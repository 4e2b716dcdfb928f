"""The hybrid model with real weights: the same greedy tokens whatever happens around a request."""

from __future__ import annotations

import pytest

from hybridsim import StateCache
from interlock.engine.request import Request
from interlock.hookspec import hookimpl
from k3nano.conftest import LENGTHS
from k3nano.play import COUNT, drain, engine, greedy
from plugins_for_tests import Base, LookupDrafter


class Chunks(Base):
    """No prefill row is longer than ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @hookimpl
    def interlock_chunk_limit(self):
        return self

    def clip(self, request, start, end):
        return min(end, start + self.size) if request.is_prefilling else end


@pytest.mark.parametrize("size", [1, 5, 16, 17, 64])
def test_any_chunking(player, prompts, oracle, size):
    few = slice(None) if size > 1 else slice(0, 8)
    tokens, _ = player(prompts[few], {"chunks": Chunks(size)})
    assert tokens == oracle[few]


def test_sixteen_neighbours(player, prompts, oracle):
    tokens, built = player(prompts, max_num_seqs=16)
    assert tokens == oracle
    assert built.stats().num_states >= 16


def test_preemption(player, prompts, oracle):
    tokens, built = player(prompts, num_blocks=24)
    assert tokens == oracle
    assert built.stats().preemptions_total > 0


@pytest.mark.parametrize("slots", [1, 3])
def test_few_state_slots(player, prompts, oracle, slots):
    tokens, _ = player(prompts, num_states=slots)
    assert tokens == oracle


@pytest.mark.parametrize("after", [1, 3, 9])
def test_aborted_requests_leave_no_trace_in_their_slots(player, prompts, oracle, after):
    built = engine(player.model, num_states=4, max_num_batched_tokens=48)
    for index in range(4):
        built.add(Request(f"gone{index}", prompts[-1 - index][::-1], greedy(40)))
    for _ in range(after):
        built.step()
    for index in range(4):
        built.abort(f"gone{index}")
    for index, prompt in enumerate(prompts):
        built.add(Request(f"p{index}", prompt, greedy()))
    assert drain(built, len(prompts)) == oracle


class Knows(LookupDrafter):
    """Drafts the oracle's tokens, with a mistake after the first few."""

    def __init__(self, prompts, oracle) -> None:
        super().__init__(slots=0)
        self.known = {tuple(p): p + o for p, o in zip(prompts, oracle, strict=True)}

    def propose(self, requests):
        return [self.drafts_of(request) for request in requests]

    def drafts_of(self, request):
        tokens = self.known[tuple(request.prompt_token_ids)]
        drafts = tokens[request.num_tokens : request.num_tokens + 4]
        right = request.num_tokens % 5
        return [*drafts[:right], *((t + 1) % 4096 for t in drafts[right:])]


def test_drafts_that_are_accepted_in_part(player, prompts, oracle):
    drafter = Knows(prompts, oracle)
    tokens, built = player(prompts, {"draft": drafter}, num_blocks=24)
    assert tokens == oracle
    stats = built.stats()
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    assert stats.preemptions_total > 0


def test_states_exported_inside_a_prefill_pass_and_shared(player, prompts, oracle):
    """Repeats of each prompt, and prompts that share a prefix, continue from stored states."""
    cache = StateCache()
    built = engine(player.model, {"cache": cache}, num_states=64)
    first = {f"p{i}": list(prompt) for i, prompt in enumerate(prompts)}
    for _ in range(2):
        for name, prompt in first.items():
            built.add(Request(name, prompt, greedy()))
        assert drain(built, len(first)) == oracle
    assert cache.counts["exported_total"] > 5
    assert cache.counts["hit_tokens_total"] > 300
    forked = prompts[-1][:100] + prompts[-2][:50]
    built.add(Request("p0", forked, greedy()))
    (warm,) = drain(built, 1)
    assert built.stats().cached_tokens_total > cache.counts["hit_tokens_total"] - 1
    (cold,), _ = player([forked])
    assert warm == cold


def test_every_length_was_there(prompts, oracle):
    assert [len(p) for p in prompts] == list(LENGTHS)
    assert all(len(tokens) == COUNT for tokens in oracle)
    assert len({tuple(tokens) for tokens in oracle}) > len(oracle) // 2
