"""What a request holds: growing its block table and its state, sharing, copying before a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from interlock.cache.blocks import BlockPool, blocks_for
from interlock.engine.request import Request

if TYPE_CHECKING:
    from interlock.engine.batch import Plan


class Needs(NamedTuple):
    """What tokens up to some end take beyond what a request has."""

    missing: int
    """New blocks."""
    shared: list[int]
    """Table indices of blocks that others hold too and that will be written."""
    state: int
    """1 if the state's slot is shared and has to be copied, else 0."""

    @property
    def blocks(self) -> int:
        return self.missing + len(self.shared)


class Memory:
    """The pools, cut into requests' block tables and state slots.

    A model without recurrent layers has no states (``num_states`` 0); then no request has a slot.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reclaim: Callable[[int, int], None],
        num_states: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.states = BlockPool(num_states)
        self.block_size = block_size
        self._reclaim = reclaim

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def has_states(self) -> bool:
        return self.states.num_blocks > 0

    def has_free(self, blocks: int, states: int = 0) -> bool:
        """Whether so many blocks and states are free, asking plugins to give some back if not."""
        short = max(0, blocks - self.pool.num_free), max(0, states - self.states.num_free)
        if any(short):
            self._reclaim(*short)
        return self.pool.num_free >= blocks and self.states.num_free >= states

    def needs(self, request: Request, end: int) -> Needs:
        """What tokens up to ``end`` take."""
        table, slot = request.block_table, request.state_slot
        first = request.num_computed_tokens // self.block_size
        shared = [i for i in range(first, len(table)) if self.pool.references(table[i]) > 1]
        missing = max(0, blocks_for(end, self.block_size) - len(table))
        return Needs(missing, shared, int(slot is not None and self.states.references(slot) > 1))

    def grow(self, request: Request, end: int, plan: Plan) -> bool:
        """Make tokens up to ``end`` writable. False, with nothing changed, if there is no room."""
        needs = self.needs(request, end)
        if not self.has_free(needs.blocks, needs.state):
            # What plugins gave back may have been these very blocks: then they need no copy.
            needs = self.needs(request, end)
            if self.pool.num_free < needs.blocks or self.states.num_free < needs.state:
                return False
        for index, target in zip(needs.shared, self.pool.allocate(len(needs.shared)), strict=True):
            source = request.block_table[index]
            plan.copies.append((source, target))
            request.block_table[index] = target
            self.pool.drop([source])
        request.block_table.extend(self.pool.allocate(needs.missing))
        if needs.state:
            self._own_state(request, plan)
        return True

    def _own_state(self, request: Request, plan: Plan) -> None:
        assert request.state_slot is not None
        (target,) = self.states.allocate(1)
        plan.state_copies.append((request.state_slot, target))
        self.states.drop([request.state_slot])
        request.state_slot = target

    def place(
        self,
        request: Request,
        table: Sequence[int | None],
        start: int,
        end: int,
        reserve: int,
        state: int | None = None,
    ) -> bool:
        """A block table: ``table`` (tokens up to ``start``), None replaced, and more up to ``end``.

        Takes references on the blocks of ``table``, and on ``state``, whose content the request
        continues from. False, with nothing taken, unless ``reserve`` more blocks stay free: room
        for running requests to grow, or admission would only preempt them. A shared block that
        ``start`` lies in, and a shared state, are copied later, by `grow`.
        """
        shared = [block for block in table if block is not None]
        states = [] if state is None else [state]
        missing = blocks_for(end, self.block_size) - len(shared)
        copied = bool(start % self.block_size and table[-1] is not None)
        self.pool.take(shared)
        self.states.take(states)
        placed = False
        try:
            # A shared state needs a slot for its copy, so each request takes one either way.
            placed = self.has_free(missing + copied + reserve, int(self.has_states))
        finally:
            if not placed:
                self.pool.drop(shared)
                self.states.drop(states)
        if placed:
            fresh = self.pool.allocate(missing)
            given = [fresh.pop(0) if block is None else block for block in table]
            request.block_table = given + fresh
            own = states or self.states.allocate(int(self.has_states))
            request.state_slot = own[0] if own else None
        return placed

    def free(self, request: Request) -> None:
        self.pool.drop(request.block_table)
        request.block_table = []
        if request.state_slot is not None:
            self.states.drop([request.state_slot])
            request.state_slot = None
