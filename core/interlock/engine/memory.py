"""Block tables of requests: growing them, sharing blocks, copying shared ones before a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interlock.cache.blocks import BlockPool, blocks_for
from interlock.engine.request import Request


class Memory:
    """The pool, cut into requests' block tables. ``copies`` are ``(source, target)`` pairs."""

    def __init__(self, num_blocks: int, block_size: int, reclaim: Callable[[int], None]) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._reclaim = reclaim

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    def has_free(self, count: int) -> bool:
        """Whether ``count`` blocks are free, asking plugins to give some back if not."""
        if self.pool.num_free < count:
            self._reclaim(count - self.pool.num_free)
        return self.pool.num_free >= count

    def needs(self, request: Request, end: int) -> tuple[int, list[int]]:
        """New blocks for tokens up to ``end``, and table indices of shared blocks to be written."""
        table = request.block_table
        first = request.num_computed_tokens // self.block_size
        shared = [i for i in range(first, len(table)) if self.pool.references(table[i]) > 1]
        return max(0, blocks_for(end, self.block_size) - len(table)), shared

    def grow(self, request: Request, end: int, copies: list[tuple[int, int]]) -> bool:
        """Make tokens up to ``end`` writable. False, with nothing changed, if there is no room."""
        missing, shared = self.needs(request, end)
        if not self.has_free(missing + len(shared)):
            # What plugins gave back may have been these blocks: then they need no copy.
            missing, shared = self.needs(request, end)
            if self.pool.num_free < missing + len(shared):
                return False
        for index, target in zip(shared, self.pool.allocate(len(shared)), strict=True):
            source = request.block_table[index]
            copies.append((source, target))
            request.block_table[index] = target
            self.pool.drop([source])
        request.block_table.extend(self.pool.allocate(missing))
        return True

    def place(
        self, request: Request, table: Sequence[int | None], start: int, end: int, reserve: int
    ) -> bool:
        """A block table: ``table`` (tokens up to ``start``), None replaced, and more up to ``end``.

        Takes references on the blocks of ``table``. False, with nothing taken, unless ``reserve``
        more blocks stay free: room for running requests to grow, or admission would only preempt
        them. A shared block that ``start`` lies in is copied later, by `grow`.
        """
        shared = [block for block in table if block is not None]
        missing = blocks_for(end, self.block_size) - len(shared)
        copied = bool(start % self.block_size and table[-1] is not None)
        self.pool.take(shared)
        placed = False
        try:
            placed = self.has_free(missing + copied + reserve)
        finally:
            if not placed:
                self.pool.drop(shared)
        if placed:
            fresh = self.pool.allocate(missing)
            given = [fresh.pop(0) if block is None else block for block in table]
            request.block_table = given + fresh
        return placed

    def free(self, request: Request) -> None:
        self.pool.drop(request.block_table)
        request.block_table = []
