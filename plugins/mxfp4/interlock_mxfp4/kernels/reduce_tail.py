"""Finalization, the sum over ranks and the norm in one kernel, over memory that all ranks map.

Every rank writes its part of a token's sum to its own buffer, tells all ranks that it has, waits
until all have told it, and adds the ranks' parts in ascending order, so that all get the same bits.
Buffers and signals alternate between two slots by call: a rank that has all signals of a call knows
that everybody has left the call before, and may overwrite its slot in the next one.

A program waits for the programs of its token on other ranks, so all of a launch must be resident at
once: `CAPACITY` tokens, fewer than the 148 multiprocessors of a B300.
"""

import torch
import triton
import triton.language as tl

from interlock_mxfp4.kernels.tail import weighted_sum

CAPACITY = 128
BOTH, PUBLISH, REDUCE = 0, 1, 2
"""Parts of the kernel: the interpreter, which runs programs one by one, needs them apart."""


# A `call` of 1 would become a constant, which has no `to`, and every sixteenth would compile anew.
@triton.jit(do_not_specialize=["call"])
def reduce_tail_kernel(
    rows, weights, row_map, norm, out, buffers, signals, rank, call, D, eps,
    WORLD: tl.constexpr, TOP: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One token; ``buffers`` and ``signals`` are int64 addresses [WORLD] of the ranks' memory."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    slot = (call % 2).to(tl.int64)
    place = (slot * SLOTS + token) * D + d
    if PART != 2:
        total = weighted_sum(rows, weights, row_map, token, d, D, TOP, BD)
        own = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
        tl.store(own + place, total, mask=d < D)
        # All threads' parts are written before one of them tells.
        tl.debug_barrier()
        for peer in tl.static_range(WORLD):
            signal = tl.load(signals + peer).to(tl.pointer_type(tl.int32))
            at = signal + (slot * WORLD + rank) * SLOTS + token
            tl.atomic_xchg(at, call, sem="release", scope="sys")
    if PART != 1:
        mine = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
        for peer in tl.static_range(WORLD):
            at = mine + (slot * WORLD + peer) * SLOTS + token
            seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            while seen != call:
                seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        total = tl.zeros((BD,), tl.float32)
        for peer in tl.static_range(WORLD):
            part = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
            total += tl.load(part + place, mask=d < D, other=0.0, volatile=True)
        total = total.to(out.dtype.element_ty).to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out + token * D + d, (total * scale * weight).to(out.dtype.element_ty), mask=d < D)


def reduce_tail(
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_map: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    buffers: torch.Tensor,
    signals: torch.Tensor,
    rank: int,
    call: int,
    out: torch.Tensor | None = None,
    part: int = BOTH,
) -> torch.Tensor:
    """RMS norm [T, D] of the ranks' finalized parts, T at most `CAPACITY`: see `reference`.

    ``buffers`` and ``signals`` int64 [ranks] are the addresses, as this rank maps them, of every
    rank's float32 [2, CAPACITY, D] and int32 [2, ranks, CAPACITY]; ``call`` counts from 1, the same
    on all ranks.
    """
    tokens, top = row_map.shape
    size = rows.shape[1]
    if tokens > CAPACITY:
        raise ValueError(
            f"{tokens} tokens; all programs of a launch wait together, so at most {CAPACITY}"
        )
    if out is None:
        out = torch.empty(tokens, size, dtype=norm.dtype, device=rows.device)
    if tokens:
        given = (each.contiguous() for each in (rows, weights, row_map))
        reduce_tail_kernel[(tokens,)](
            *given, norm, out, buffers, signals, rank, call, size, eps,
            WORLD=len(buffers), TOP=top, BD=triton.next_power_of_2(size), SLOTS=CAPACITY,
            PART=part, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out
