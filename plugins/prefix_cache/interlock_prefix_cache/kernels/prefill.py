"""KDA prefill of packed sequences, 16 tokens at a time, with states exported in the same pass.

A program has one sequence, one head and a block of value channels, and carries the state in
registers. Where a checkpoint is wanted the state is stored between two chunks: it is then bit for
bit what a run of that prefix alone would end with. The formulas are those of
`interlock.ops.kda.kda_chunk`; a chunk's triangular system is solved for the right-hand side with
the state in it. Products of float32 take three tf32 ones each, which keeps float32's precision.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

CHUNK = 16
MOST = 2
WARPS = 8
"""Checkpoints of one sequence."""


@triton.jit
def row_of(x, index, i):
    """Row ``i`` of x [16, D], as [D]."""
    return tl.sum(tl.where((index == i)[:, None], x, 0.0), 0)


@triton.jit
def pairs(q, k, total, index, CHUNK: tl.constexpr):
    """sum_d k_id k_jd e^(G_id - G_jd) and the same of q, for i >= j: [16, 16] twice."""
    among = tl.zeros((CHUNK, CHUNK), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for j in range(CHUNK):
        # Masked before exp: a token that is still to come would overflow.
        apart = tl.where((index >= j)[:, None], total - row_of(total, index, j)[None, :], -1e30)
        weighted = tl.exp(apart) * row_of(k, index, j)[None, :]
        column = index[None, :] == j
        among = tl.where(column, tl.sum(weighted * k, 1)[:, None], among)
        scores = tl.where(column, tl.sum(weighted * q, 1)[:, None], scores)
    return among, scores


@triton.jit
def kda_prefill_kernel(
    q, k, v, g, beta, states, out, starts, slots, positions, targets, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.arange(0, CHUNK)
    kk = tl.arange(0, K)
    vv = tl.program_id(2) * BV + tl.arange(0, BV)
    begin = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    inside = kk[:, None] * V + vv[None, :]
    own = states + (tl.load(slots + sequence).to(tl.int64) * H + head) * K * V + inside
    keep = (vv < V)[None, :]
    state = tl.load(own, mask=keep, other=0.0)
    for first in range(begin, end, CHUNK):
        for i in tl.static_range(MOST):
            if tl.load(positions + sequence * MOST + i) == first - begin:
                target = tl.load(targets + sequence * MOST + i).to(tl.int64)
                tl.store(states + (target * H + head) * K * V + inside, state, mask=keep)
        token = first + index
        live = token < end
        place = (token * H + head)[:, None] * K + kk[None, :]
        qc = tl.load(q + place, mask=live[:, None], other=0.0).to(tl.float32)
        kc = tl.load(k + place, mask=live[:, None], other=0.0).to(tl.float32)
        gc = tl.load(g + place, mask=live[:, None], other=0.0).to(tl.float32)
        values = (token * H + head)[:, None] * V + vv[None, :]
        vc = tl.load(v + values, mask=live[:, None] & keep, other=0.0).to(tl.float32)
        bc = tl.load(beta + token * H + head, mask=live, other=0.0).to(tl.float32)
        total = tl.cumsum(gc, 0)
        among, scores = pairs(qc, kc, total, index, CHUNK)
        lower = tl.where(index[:, None] > index[None, :], bc[:, None] * among, 0.0)
        recalled = tl.dot(kc * tl.exp(total), state, input_precision="tf32x3")
        fresh = bc[:, None] * (vc - recalled)
        for i in range(1, CHUNK):
            known = tl.sum(row_of(lower, index, i)[:, None] * fresh, 0)
            fresh = tl.where((index == i)[:, None], fresh - known[None, :], fresh)
        result = tl.dot(qc * tl.exp(total), state, input_precision="tf32x3")
        seen = tl.where(index[:, None] >= index[None, :], scores, 0.0)
        result += tl.dot(seen, fresh, input_precision="tf32x3")
        tl.store(out + values, result.to(out.dtype.element_ty), mask=live[:, None] & keep)
        last = tl.sum(gc, 0)
        writes = tl.trans(kc * tl.exp(last[None, :] - total))
        state = state * tl.exp(last)[:, None] + tl.dot(writes, fresh, input_precision="tf32x3")
    tl.store(own, state, mask=keep)


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    lengths: Sequence[int],
    slots: Sequence[int],
    exports: Sequence[Sequence[tuple[int, int]]],
    out: torch.Tensor | None = None,
    block: int = 32,
) -> torch.Tensor:
    """As `reference.kda_prefill`, in one launch; two exports per sequence, K a power of two."""
    for length, wanted in zip(lengths, exports, strict=True):
        if len(wanted) > MOST or any(p % CHUNK or not 0 < p < length for p, _ in wanted):
            raise ValueError(
                f"exports {list(wanted)} of {length} tokens: at most {MOST}, at multiples of "
                f"{CHUNK} inside"
            )
    out = torch.empty_like(v) if out is None else out
    if not lengths:
        return out
    ends = torch.tensor([0, *lengths]).cumsum(0)
    padded = [[*wanted, *[(-1, 0)] * (MOST - len(wanted))] for wanted in exports]
    numbers = torch.tensor(padded, dtype=torch.int32)
    device, (_, heads, keys), values = q.device, q.shape, v.shape[2]
    kda_prefill_kernel[(len(lengths), heads, triton.cdiv(values, block))](
        *(x.contiguous() for x in (q, k, v, g, beta)), states, out,
        ends.to(torch.int32).to(device), torch.tensor(slots, dtype=torch.int32, device=device),
        numbers[..., 0].contiguous().to(device), numbers[..., 1].contiguous().to(device), heads,
        K=keys, V=values, BV=block, CHUNK=CHUNK, MOST=MOST, num_warps=WARPS,
    )  # fmt: skip
    return out


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    exports: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The core's op of one row, by this kernel: see `interlock.ops.kda.kda_chunk`."""
    states = state.new_empty(1 + len(exports), *state.shape)
    states[0] = state
    wanted = [(position, 1 + i) for i, position in enumerate(exports)]
    out = torch.empty(v.shape, dtype=state.dtype, device=v.device)
    kda_prefill(q, k, v, g, beta, states, [len(q)], [0], [wanted], out=out)
    return out, states[0], list(states[1:])
