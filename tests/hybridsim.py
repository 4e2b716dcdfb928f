"""The simulated runner with recurrent states beside its cache, and plugins that know of them.

A state is the entry of the last token that went into it. A step continues from the state in the
row's slot and from nothing else, so a stale, shared, misplaced or unsettled state changes tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch

from interlock.engine.batch import Batch, Plan
from interlock.engine.request import Request
from interlock.extension import STATE_GRID, Geometry, Match
from interlock.hookspec import hookimpl
from plugins_for_tests import Load, PrefixCache, RemoteSource
from sim import VOCAB, SimRunner, entries_of, entry

EMPTY = 1
GARBAGE = 12345


class HybridRunner(SimRunner):
    """Slots are full of garbage until they are zeroed, copied into, exported to or filled."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, num_states: int = 8, max_len: int = 256
    ) -> None:
        super().__init__(num_blocks, block_size, max_len)
        self.geometry = Geometry(num_blocks, block_size, max_len, VOCAB, num_states)
        self.states = [GARBAGE] * num_states
        self.versions: list[list[int]] = []

    def forward(self, plan: Plan) -> torch.Tensor:
        sources = [self.states[source] for source, _ in plan.state_copies]
        for (_, target), state in zip(plan.state_copies, sources, strict=True):
            self.states[target] = state
        for slot in plan.clears:
            self.states[slot] = EMPTY
        return super().forward(plan)

    def _write(self, batch: Batch) -> None:
        slots, tokens = batch.slot_mapping.tolist(), batch.token_ids.tolist()
        self.versions = []
        for row, (begin, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            versions = [self.states[batch.state_slots[row]]]
            for index in range(begin, end):
                versions.append(entry(versions[-1], tokens[index]))
                self.cache[slots[index]] = versions[-1]
            for offset, slot in batch.exports[row]:
                self.states[slot] = versions[offset]
            self.versions.append(versions)
            # What a runner leaves in a verify row's slot before it is settled is its own business.
            verifies = row < batch.verify.rows.stop
            self.states[batch.state_slots[row]] = GARBAGE if verifies else versions[-1]

    def settle(self, plan: Plan, kept: Sequence[int]) -> None:
        for row, versions, count in zip(plan.rows, self.versions, kept, strict=True):
            if row.draft_tokens:
                slot = row.request.state_slot
                assert slot is not None
                self.states[slot] = versions[count]


class StateCache(PrefixCache):
    """A prefix cache that keeps states too: of ended requests, and exported inside rows.

    A prefix is shared as far as both its blocks and a state at its very end are known.
    """

    supplies_states = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.pending: dict[str, list[tuple[int, int]]] = {}

    def held_states(self) -> list[int]:
        return [*self.kept.values(), *(s for p in self.pending.values() for _, s in p)]

    @hookimpl
    def interlock_kv_source(self, engine):
        self.states = engine.scheduler.memory.states
        return super().interlock_kv_source(engine)

    @hookimpl
    def interlock_state_exports(self):
        return self

    def plan(self, request: Request, start: int, stop: int) -> list[tuple[int, int]]:
        self.abandon(request)
        position = start + (stop - 1 - start) // STATE_GRID * STATE_GRID
        if position <= start or not self.states.num_free:
            return []
        self.pending[request.id] = [(position, self.states.allocate(1)[0])]
        return list(self.pending[request.id])

    def abandon(self, request: Request) -> None:
        for _, slot in self.pending.pop(request.id, ()):
            self.states.drop([slot])

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        found = super().match(request, start, stop)
        if found is None:
            return None
        for end in range(start + found.num_tokens, start, -1):
            slot = self.kept.get(tuple(request.token_ids[:end]))
            if slot is not None:
                count = -(-(end - start) // self.size)
                return Match(end - start, found.blocks[:count], slot)
        return None

    @hookimpl
    def interlock_kv_committed(self, spans):
        super().interlock_kv_committed(spans)
        for request, _, stop in spans:
            for position, slot in self.pending.pop(request.id, ()):
                self.keep(tuple(request.token_ids[:position]), slot)
                self.counts["exported_total"] += 1
            if request.finished and request.state_slot is not None:
                self.states.take([request.state_slot])
                self.keep(tuple(request.token_ids[:stop]), request.state_slot)

    def keep(self, key: tuple[int, ...], slot: int) -> None:
        if key in self.kept:
            self.states.drop([slot])
        else:
            self.kept[key] = slot

    @hookimpl
    def interlock_requests_preempted(self, requests):
        for request in requests:
            self.abandon(request)

    @hookimpl
    def interlock_requests_finished(self, requests):
        super().interlock_requests_finished(requests)
        for request in requests:
            self.abandon(request)

    @hookimpl
    def interlock_reclaim(self, num_blocks, num_states):
        super().interlock_reclaim(num_blocks)
        unused = [k for k, slot in self.kept.items() if self.states.references(slot) == 1]
        for key in unused[:num_states]:
            self.states.drop([self.kept.pop(key)])


class HybridRemote(RemoteSource):
    """Fills the request's state slot as well, holding references on it meanwhile."""

    supplies_states = True

    def __init__(self, runner: HybridRunner, polls: int = 3) -> None:
        super().__init__(runner, polls)
        self.slots: dict[str, int] = {}

    def held_states(self) -> list[int]:
        return list(self.slots.values())

    @hookimpl
    def interlock_kv_source(self, engine):
        self.states = engine.scheduler.memory.states
        return super().interlock_kv_source(engine)

    def hold(self, request: Request, name: str) -> None:
        super().hold(request, name)
        assert request.state_slot is not None
        self.states.take([request.state_slot])
        self.slots[name] = request.state_slot

    def complete(self, load: Load) -> None:
        slot = self.slots.pop(load.name)
        assert isinstance(self.runner, HybridRunner)
        self.runner.states[slot] = entries_of(load.tokens)[-1]
        self.states.drop([slot])
        super().complete(load)
