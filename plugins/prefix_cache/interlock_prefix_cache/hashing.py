"""Names of token prefixes: chained 128-bit hashes, the same in every process and on every host.

A prefix of whole blocks is named by the hash of its last block's tokens and the name of the prefix
before it (so equal blocks under different parents have different names), down to a root that holds
everything else that cached content depends on. Parts of the root are tagged and length-delimited:
``["a", "b"]`` is not ``["ab"]``, and a salt is not an adapter of the same name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import xxhash

Name = bytes


def root(parts: Iterable[tuple[str, str | None]]) -> Name:
    """The name of the empty prefix, for ``(tag, value)`` parts; None is not an empty value."""
    digest = xxhash.xxh3_128()
    for tag, value in parts:
        for text in (tag, "" if value is None else f"={value}"):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def child(parent: Name, tokens: Sequence[int]) -> Name:
    """The name of ``parent``'s prefix with ``tokens`` behind it."""
    return xxhash.xxh3_128_digest(parent + array("q", tokens).tobytes())


class Chain:
    """The names of one request's prefixes, computed once as its tokens grow."""

    __slots__ = ("_block", "_names", "junction", "published")

    def __init__(self, root: Name, block_size: int) -> None:
        self._names = [root]
        self._block = block_size
        self.published = 0
        """Whole blocks that have been offered to the index."""
        self.junction = 0
        """Where an admission found blocks but no state to go on from: others share up to there."""

    def name(self, blocks: int, tokens: Sequence[int]) -> Name:
        """Of the first ``blocks`` blocks of ``tokens``, which only ever grow."""
        size = self._block
        while len(self._names) <= blocks:
            begin = (len(self._names) - 1) * size
            self._names.append(child(self._names[-1], tokens[begin : begin + size]))
        return self._names[blocks]
