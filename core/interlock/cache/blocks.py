"""A pool of numbered, reference-counted slots: KV blocks, and slots for recurrent states.

Ownership is a reference count: whoever needs a slot takes a reference and drops it later. A slot
is free when nobody holds it. The pool never looks inside a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """Fewer free slots than asked for; nothing was taken."""


class BlockPool:
    """``num_blocks`` slots with reference counts.

    Freed slots are reused last-in first-out, which keeps the working set small on a CPU.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of slots in use, 0 to 1."""
        return (self.num_blocks - len(self._free)) / max(1, self.num_blocks)

    def allocate(self, count: int) -> list[int]:
        """``count`` slots with one reference each; raises OutOfBlocksError and takes none."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def take(self, blocks: Iterable[int]) -> None:
        """One more reference on each of ``blocks``, which somebody must already hold."""
        for block in blocks:
            if self._refs[block] <= 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each of ``blocks``; the last one frees it."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise ValueError(f"block {block} is free already")
            self._refs[block] = refs
            if refs == 0:
                self._free.append(block)

    def references(self, block: int) -> int:
        return self._refs[block]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless ``holders``' lists explain every reference exactly."""
        held = Counter(block for blocks in holders for block in blocks)
        for block, refs in enumerate(self._refs):
            assert refs == held[block], f"block {block}: {refs} references, {held[block]} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is listed as free twice"
        assert free == {b for b, r in enumerate(self._refs) if r == 0}, (
            "free list and counts differ"
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)
