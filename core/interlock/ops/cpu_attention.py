"""Paged attention on the CPU for rows of few tokens (decode, verify): reads the pool in place.

A row's keys are cut into segments of 128, which are the tasks that threads share; a segment gives
unnormalized values, softmax maximum and sum, and the thread that finishes a row's last segment
merges them in order. Segments depend on the row's own context only, so a row's result has the same
bits whatever else is in the batch, and a verify token's the same as a decode token's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interlock.ops.launch import TASK, THREAD, Kernel, source_stamp, team
from interlock.ops.simd import (
    BF16,
    F32,
    add,
    arg,
    as_float,
    div,
    exp,
    fetch_add,
    first,
    fma,
    get,
    int32_at,
    jit,
    keep_first,
    larger,
    largest,
    load,
    mul,
    prefetch,
    put,
    set_int,
    splat,
    store,
    sub,
    total,
)
from interlock.ops.tiles import scores, weigh

SEGMENT = 128
"""Keys per task: short enough to share one long row among cores, long enough to stream."""
AHEAD = 2
"""Runs of 16 keys that are on their way from memory while one is worked on."""
NEGATIVE = float("-inf")
LANES = 16
TASK_WORDS = 8
"""int32 fields of a task: token, row, context, first key, segments of the token, its first task."""


@jit
def _addresses(table: int, begin: int, count: int, block: int, row: int, out: int) -> None:
    """Byte offsets in the pool of ``count`` keys, filled up to whole vectors with the last one."""
    index = begin // block
    inside = begin - index * block
    offset = (int32_at(table, index) * block + inside) * row
    for i in range(count):
        if inside == block:
            index, inside = index + 1, 0
            offset = int32_at(table, index) * block * row
        set_int(out + 8 * i, offset)
        offset, inside = offset + row, inside + 1
    for i in range(count, (count + LANES - 1) // LANES * LANES):
        set_int(out + 8 * i, offset - row)


@jit
def _fetch(base: int, offsets: int, first: int, last: int, row: int) -> None:
    """Start loading some keys: blocks lie anywhere, so the CPU can't guess what is read next."""
    for i in range(first, last):
        at = base + arg(offsets, i)
        for line in range(0, row, 64):
            prefetch(at + line)


@jit
def _softmax(line: int, weights: int, runs: int, result: int, kind: int) -> None:
    """Scores (float32) to weights ``exp(score - maximum)``; their maximum and sum to ``result``."""
    size = 2 if kind == BF16 else 4
    top = load(line, F32)
    for r in range(1, runs):
        top = larger(top, load(line + 64 * r, F32))
    highest = largest(top)
    top = splat(highest)
    whole = splat(0.0)
    for r in range(runs):
        at = weights + LANES * size * r
        store(at, exp(sub(load(line + 64 * r, F32), top)), kind)
        # The sum is of the rounded weights, as those multiply the values.
        whole = add(whole, load(at, kind))
    put(result, highest, F32)
    put(result + 4, total(whole), F32)


@jit
def _merge(
    values: int, sums: int, segments: int, stride: int, dim: int, out: int, kind: int
) -> None:
    """One head of one token: weigh its segments' values by their maxima and store the mean."""
    size = 2 if kind == BF16 else 4
    top = get(sums, F32)
    for s in range(1, segments):
        top = max(top, get(sums + s * stride, F32))
    whole = splat(0.0)
    for s in range(segments):
        at = sums + s * stride
        fade = exp(splat(get(at, F32) - top))
        whole = fma(splat(get(at + 4, F32)), fade, whole)
        put(at + 8, first(fade), F32)
    for d in range(0, dim, LANES):
        value = splat(0.0)
        for s in range(segments):
            fade = splat(get(sums + s * stride + 8, F32))
            value = fma(load(values + s * stride + 4 * d, F32), fade, value)
        store(out + size * d, div(value, whole), kind)


def _attend(stamp: int, kind: int, dim: int, heads: int, groups: int) -> Callable[[int], None]:
    """``heads`` query heads share ``groups`` KV heads; all are constants of the compiled code."""
    size = 2 if kind == BF16 else 4
    share = heads // groups
    record = 64 + 4 * dim

    def kernel(p: int) -> None:
        _ = stamp
        tasks, plan, q, q_stride = arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        k_cache, v_cache, tables, table_stride = arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9)
        block, out, parts, counters = arg(p, 10), arg(p, 11), arg(p, 12), arg(p, 13)
        scale = splat(as_float(arg(p, 14)))
        mine = arg(p, 15) + fetch_add(p + THREAD, 1) * arg(p, 16)
        offsets = mine
        lines = offsets + 8 * SEGMENT
        weights = lines + 4 * SEGMENT * heads
        row_bytes = groups * dim * size
        task = fetch_add(p + TASK, 1)
        while task < tasks:
            at = plan + 4 * TASK_WORDS * task
            token, row, context = int32_at(at, 0), int32_at(at, 1), int32_at(at, 2)
            begin, segments, base = int32_at(at, 3), int32_at(at, 4), int32_at(at, 5)
            count = min(SEGMENT, context - begin)
            runs = (count + LANES - 1) // LANES
            query = q + token * q_stride
            target = parts + task * heads * record
            _addresses(tables + row * table_stride, begin, count, block, row_bytes, offsets)
            for r in range(runs):
                ahead = min(r + AHEAD, runs - 1) * LANES
                for h in range(heads):
                    # In small portions: a burst of loads would stop the arithmetic.
                    i, j = h * LANES // heads, (h + 1) * LANES // heads
                    _fetch(k_cache, offsets, ahead + i, ahead + j, row_bytes)
                    _fetch(v_cache, offsets, LANES * r + i, LANES * r + j, row_bytes)
                    key = k_cache + h // share * dim * size
                    s = scores(key, offsets + 8 * LANES * r, query + h * dim * size, dim, kind)
                    s = keep_first(mul(s, scale), count - LANES * r, NEGATIVE)
                    store(lines + 4 * (SEGMENT * h + LANES * r), s, F32)
            for h in range(heads):
                _softmax(
                    lines + 4 * SEGMENT * h, weights + size * SEGMENT * h, runs,
                    target + 4 * dim * heads + 64 * h, kind,
                )  # fmt: skip
            for g in range(groups):
                weigh(
                    v_cache + g * dim * size, offsets, runs, weights + size * SEGMENT * g * share,
                    size * SEGMENT, target + 4 * dim * g * share, share, dim, kind,
                )  # fmt: skip
            counter = counters + 8 * base
            if fetch_add(counter, 1) == segments - 1:
                set_int(counter, 0)
                start = parts + base * heads * record
                for h in range(heads):
                    _merge(
                        start + 4 * dim * h, start + 4 * dim * heads + 64 * h, segments,
                        heads * record, dim, out + (token * heads + h) * dim * size, kind,
                    )  # fmt: skip
            task = fetch_add(p + TASK, 1)

    return kernel


class PagedAttention:
    """Attention of verify and decode rows; the work list is made once per batch, not per layer."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._plan = torch.empty(0, dtype=torch.int32)
        self._parts = torch.empty(0, dtype=torch.uint8)
        self._counters = torch.empty(0, dtype=torch.int64)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Any, scale: float, out: Tensor
    ) -> None:
        """Write ``out`` [T, Hq * D] for the tokens of the verify and decode rows."""
        if batch is not self._batch:
            self._plan, self._batch = work_list(batch), batch
        tasks = len(self._plan)
        heads, dim = q.shape[1:]
        block, groups = k_cache.shape[1:3]
        self._reserve(tasks, heads * (64 + 4 * dim))
        threads, size = team(), q.element_size()
        scratch, stride = threads.scratch(_scratch_bytes(heads))
        tables = batch.block_tables
        attend_kernel(q.dtype, dim, heads, groups)(
            min(threads.size, tasks), tasks, self._plan.data_ptr(), q.data_ptr(),
            q.stride(0) * size, k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(),
            4 * tables.stride(0), block, out.data_ptr(), self._parts.data_ptr(),
            self._counters.data_ptr(), float_bits(scale), scratch, stride,
        )  # fmt: skip

    def _reserve(self, tasks: int, record: int) -> None:
        if self._parts.numel() < tasks * record:
            self._parts = torch.empty(tasks * record, dtype=torch.uint8)
        if self._counters.numel() < tasks:
            # The kernel leaves every counter at zero.
            self._counters = torch.zeros(tasks, dtype=torch.int64)


def _scratch_bytes(heads: int) -> int:
    return SEGMENT * (8 + 8 * heads)


def float_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def work_list(batch: Any) -> Tensor:
    """int32 [tasks, 8]: every (token, segment) of the verify and decode rows, see `TASK_WORDS`."""
    rows = range(batch.verify.rows.start, batch.decode.rows.stop)
    lengths = np.array([batch.query_lens[r] for r in rows], dtype=np.int64)
    ends = np.array([batch.context[r] for r in rows], dtype=np.int64)
    tokens = int(lengths.sum())
    row = np.repeat(np.arange(rows.start, rows.stop), lengths)
    after = np.repeat(np.cumsum(lengths), lengths) - np.arange(tokens) - 1
    context = np.repeat(ends, lengths) - after
    segments = -(-context // SEGMENT)
    base = np.cumsum(segments) - segments
    plan = np.zeros((int(segments.sum()), TASK_WORDS), dtype=np.int32)
    token = np.arange(tokens) + batch.verify.tokens.start
    for field, values in enumerate((token, row, context, base, segments, base)):
        plan[:, field] = np.repeat(values, segments)
    plan[:, 3] = (np.arange(len(plan)) - plan[:, 3]) * SEGMENT
    return torch.from_numpy(plan)


@functools.cache
def attend_kernel(dtype: torch.dtype, dim: int, heads: int, groups: int) -> Kernel:
    kind = BF16 if dtype == torch.bfloat16 else F32
    return Kernel(_attend(source_stamp(), kind, dim, heads, groups))
