"""The batch contract: how one step's rows lie in memory, for every layer and every kernel.

Rows come in three contiguous runs, always in this order: *verify* rows (draft tokens to be
checked, at least two tokens each), *decode* rows (exactly one token, everything before it is in
the cache) and *prefill* rows. Padding, if a backend wants any, trails with slot -1. Whether a row
is still prefilling is stated, never to be inferred from its length: the last chunk of a prompt
may have one token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from interlock.engine.request import Request


class Span(NamedTuple):
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Partition(NamedTuple):
    """A contiguous run of rows, and the contiguous run of tokens that they own."""

    rows: Span
    tokens: Span


@attrs.define(slots=True, eq=False)
class Row:
    """One request's share of a step: tokens ``start`` to ``start + num_tokens``.

    The last ``len(draft_tokens)`` of them are drafts that only this step will accept or reject.
    ``num_logits`` trailing tokens need logits: 0 for an inner prefill chunk, 1 + drafts when the
    row reaches the request's newest token, all of them when prompt log-probabilities are wanted.
    """

    request: Request
    start: int
    num_tokens: int
    draft_tokens: list[int]
    num_logits: int
    is_prefilling: bool
    exports: list[tuple[int, int]] = attrs.field(factory=list)
    """``(position, slot)``: slots that receive the recurrent state after ``position`` tokens."""

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        drafts = len(self.draft_tokens)
        return self.request.token_ids[self.start : self.stop - drafts] + self.draft_tokens

    @property
    def samples(self) -> bool:
        """Whether this row reaches the end of what is known, so that a token is chosen."""
        return self.stop - len(self.draft_tokens) == self.request.num_tokens


@attrs.define(slots=True, eq=False)
class Plan:
    """What one step computes: rows in partition order, and what is copied before it.

    A runner copies blocks and states, then zeroes `clears`, then runs the rows. All sources are
    read before any target is written: a source may get a new owner in the same plan.
    """

    step: int
    rows: list[Row] = attrs.field(factory=list)
    copies: list[tuple[int, int]] = attrs.field(factory=list)
    """``(source, target)`` block pairs: a shared block is copied before it is written."""
    state_copies: list[tuple[int, int]] = attrs.field(factory=list)
    """The same for state slots."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def clears(self) -> list[int]:
        """State slots of rows that begin a sequence: whatever a former owner left is zeroed."""
        slots = [row.request.state_slot for row in self.rows if row.start == 0]
        return [slot for slot in slots if slot is not None]

    def forget(self, request: Request) -> None:
        """Take a request out: its memory may get another owner in this very plan."""
        self.rows = [row for row in self.rows if row.request is not request]
        self.copies = [c for c in self.copies if c[1] not in request.block_table]
        self.state_copies = [c for c in self.state_copies if c[1] != request.state_slot]


@attrs.define(slots=True, eq=False)
class Batch:
    """Tensors and row lists of one step. T tokens, R rows, S positions that need logits."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, block * block_size + offset; -1: write nothing
    cu_seqlens_q: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32, tokens in the cache once this step has written
    block_tables: Tensor  # [R, max_blocks] int32, padded with -1
    is_prefilling: Tensor  # [R] bool
    logits_indices: Tensor  # [S] int64
    verify: Partition
    decode: Partition
    prefill: Partition
    query_lens: list[int]
    context: list[int]
    tables: list[list[int]]
    state_slots: list[int]
    """Each row's slot for recurrent states; empty for a model without them."""
    state_index: Tensor  # [R] int64, the same; empty likewise
    starts: list[int]
    """``cu_seqlens_q`` as a list."""
    exports: list[list[tuple[int, int]]]
    """Each row's exports, positions counted from the row's first token."""

    @classmethod
    def build(cls, rows: list[Row], block_size: int, device: torch.device) -> Batch:
        """Lay out ``rows``, which must be in partition order."""
        query_lens = [row.num_tokens for row in rows]
        context = [row.stop for row in rows]
        tables = [row.request.block_table for row in rows]
        starts = _starts(query_lens)
        verify, decode, prefill = _partitions(rows, starts)
        positions = _positions(rows)
        block_tables = _block_tables(tables)
        slots = [row.request.state_slot for row in rows if row.request.state_slot is not None]

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(
            token_ids=put(torch.tensor([t for row in rows for t in row.token_ids])),
            positions=put(positions),
            slot_mapping=put(_slots(query_lens, positions, block_tables, block_size)),
            cu_seqlens_q=put(torch.tensor(starts, dtype=torch.int32)),
            context_lens=put(torch.tensor(context, dtype=torch.int32)),
            block_tables=put(block_tables),
            is_prefilling=put(torch.tensor([row.is_prefilling for row in rows])),
            logits_indices=put(torch.tensor(_logits(rows, starts), dtype=torch.int64)),
            verify=verify,
            decode=decode,
            prefill=prefill,
            query_lens=query_lens,
            context=context,
            tables=tables,
            starts=starts,
            state_slots=slots,
            state_index=put(torch.tensor(slots, dtype=torch.int64)),
            exports=[[(at - row.start, slot) for at, slot in row.exports] for row in rows],
        )


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _partitions(rows: list[Row], starts: list[int]) -> tuple[Partition, Partition, Partition]:
    kinds = [order_key(row) for row in rows]
    assert kinds == sorted(kinds), "rows are not in partition order"
    first, second = kinds.count(0), kinds.count(0) + kinds.count(1)
    bounds = (0, first, second, len(rows))
    spans = [Span(a, b) for a, b in pairwise(bounds)]
    verify, decode, prefill = (Partition(s, Span(starts[s.start], starts[s.stop])) for s in spans)
    return verify, decode, prefill


def order_key(row: Row) -> int:
    """0 verify, 1 decode, 2 prefill: the order in which rows are laid out."""
    if row.is_prefilling:
        return 2
    return 0 if row.draft_tokens else 1


def _positions(rows: list[Row]) -> Tensor:
    if all(row.num_tokens == 1 for row in rows):
        return torch.tensor([row.start for row in rows], dtype=torch.int64)
    return torch.cat([torch.arange(row.start, row.stop) for row in rows])


def _block_tables(tables: list[list[int]]) -> Tensor:
    width = max((len(t) for t in tables), default=0)
    return torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32).view(
        len(tables), width
    )


def _slots(lengths: list[int], positions: Tensor, tables: Tensor, block_size: int) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    blocks = tables[rows, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size


def _logits(rows: list[Row], starts: list[int]) -> list[int]:
    return [
        index
        for row, stop in zip(rows, starts[1:], strict=True)
        for index in range(stop - row.num_logits, stop)
    ]
