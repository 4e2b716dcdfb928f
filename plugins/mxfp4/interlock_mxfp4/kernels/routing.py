"""Sorting (token, slot) pairs by expert: a counting sort without atomics, so always the same.

Rows of an expert are in ascending order of their pairs and begin at a multiple of ``block``, so
that a tile of rows belongs to one expert.
"""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.kernels.reference import Routing, padded_rows

STEP = 64
"""Pairs that one program ranks by comparing each with each."""


@triton.jit
def _count(ids, counts, pairs, E, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """How many pairs of a chunk go to each expert; the bin after the last takes those of none."""
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + i, mask=i < pairs, other=-1).to(tl.int32)
    found = tl.histogram(tl.where(expert < 0, E, expert), BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit
def _offsets(counts, starts, chunks, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """First rows of experts; ``counts`` becomes how many pairs earlier chunks have for each."""
    expert = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for chunk in range(chunks):
        here = tl.load(counts + chunk * BINS + expert)
        tl.store(counts + chunk * BINS + expert, total)
        total += here
    padded = tl.where(expert < E, (total + BLOCK - 1) // BLOCK * BLOCK, 0)
    first = tl.cumsum(padded, 0) - padded
    tl.store(starts + expert, first, mask=expert <= E)


@triton.jit
def _place(
    ids, counts, starts, row_token, row_map, pairs, top,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Give every pair its row: the expert's first, plus the pairs of it that come before."""
    chunk = tl.program_id(0)
    step = tl.program_id(1)
    i = chunk * CHUNK + step * STEP + tl.arange(0, STEP)
    expert = tl.load(ids + i, mask=i < pairs, other=-1).to(tl.int32)
    rank = tl.zeros((STEP,), tl.int32)
    for earlier in range(step + 1):
        j = chunk * CHUNK + earlier * STEP + tl.arange(0, STEP)
        other = tl.load(ids + j, mask=j < pairs, other=-1).to(tl.int32)
        same = (other[None, :] == expert[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    here = expert >= 0
    row = tl.load(starts + expert, mask=here, other=0)
    row += tl.load(counts + chunk * BINS + expert, mask=here, other=0) + rank
    tl.store(row_map + i, tl.where(here, row, -1), mask=i < pairs)
    tl.store(row_token + row, i // top, mask=here & (i < pairs))


def sort_tokens(ids: torch.Tensor, num_experts: int, block: int) -> Routing:
    """Rows for ids [T, top] of experts, -1 for none: see `Routing`. Three launches."""
    pairs, top = ids.numel(), ids.shape[1]
    row_map = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    rows = padded_rows(pairs, num_experts, block)
    row_token = torch.full((rows,), -1, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    # Longer chunks for more pairs: the scan goes over chunks one by one.
    steps = max(1, min(32, triton.next_power_of_2(pairs // (64 * STEP))))
    chunks, bins = triton.cdiv(pairs, steps * STEP), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty(max(chunks, 1), bins, dtype=torch.int32, device=ids.device)
    given = ids.contiguous()
    if chunks:
        _count[(chunks,)](given, counts, pairs, num_experts, CHUNK=steps * STEP, BINS=bins)
    _offsets[(1,)](counts, starts, chunks, num_experts, BLOCK=block, BINS=bins)
    if chunks:
        _place[(chunks, steps)](
            given, counts, starts, row_token, row_map, pairs, top,
            CHUNK=steps * STEP, STEP=STEP, BINS=bins, num_warps=8,
        )  # fmt: skip
    return Routing(row_token, row_map, starts)
