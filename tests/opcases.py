"""Batches, caches and weights for the tests of ops and linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import attrs
import torch
from torch import Tensor

from interlock.engine.batch import Batch, Partition, Span
from interlock.weights.source import TensorInfo

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
# Error relative to the largest value: half a unit of bf16's last place is 2^-9, plus the bf16
# weights of the softmax.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-6}
Rows = Sequence[tuple[int, int]]


def batch(verify: Rows = (), decode: Rows = (), prefill: Rows = (), *, block: int = 16) -> Batch:
    """A batch of rows (tokens, context); blocks are handed out in a shuffled order."""
    rows = [*verify, *decode, *prefill]
    needed = [-(-context // block) for _, context in rows]
    free = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(7)).tolist()
    return of_tables(verify, decode, prefill, [[free.pop() for _ in range(n)] for n in needed])


def of_tables(verify: Rows, decode: Rows, prefill: Rows, tables: list[list[int]]) -> Batch:
    rows = [*verify, *decode, *prefill]
    lengths, context = [n for n, _ in rows], [c for _, c in rows]
    starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
    ends = (0, len(verify), len(verify) + len(decode), len(rows))
    spans = [Span(a, b) for a, b in pairwise(ends)]
    parts = [Partition(s, Span(starts[s.start], starts[s.stop])) for s in spans]
    width = max((len(t) for t in tables), default=0)
    nothing = torch.zeros(sum(lengths), dtype=torch.int64)
    return Batch(
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(context, dtype=torch.int32),
        block_tables=torch.tensor(
            [t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32
        ).view(len(tables), width),
        is_prefilling=torch.tensor([i >= ends[2] for i in range(len(rows))]),
        logits_indices=torch.tensor([], dtype=torch.int64),
        verify=parts[0],
        decode=parts[1],
        prefill=parts[2],
        query_lens=lengths,
        context=context,
        tables=tables,
        state_slots=[],
        state_index=nothing,
        starts=starts,
        exports=[[] for _ in tables],
    )


def caches(b: Batch, block: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random keys and values of each row's context; every slot that no row owns is NaN."""
    blocks = 4 + max((i for table in b.tables for i in table), default=0)
    out = []
    for seed in (1, 2):
        pool = torch.full((blocks, block, heads, dim), float("nan"), dtype=dtype)
        for row, (table, context) in enumerate(zip(b.tables, b.context, strict=True)):
            numbers = random(len(table) * block, heads, dim, seed=10 * row + seed)
            numbers[context:] = float("nan")
            pool[table] = numbers.view(-1, block, heads, dim).to(dtype)
        out.append(pool)
    return out[0], out[1]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest wanted value; NaN where ``got`` has any."""
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@attrs.frozen
class FakeWeight:
    """A `WeightTensor` that holds its numbers, and its GGUF blocks if it has any."""

    info: TensorInfo
    numbers: Tensor
    raw: Tensor | None = None

    @classmethod
    def plain(cls, numbers: Tensor) -> FakeWeight:
        return cls(_info(numbers, "F32"), numbers)

    @classmethod
    def quantized(cls, numbers: Tensor, kind: str) -> FakeWeight:
        """Quantize with the gguf package, whose own dequantization gives the exact numbers."""
        import gguf

        type_ = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(numbers.float().numpy(), type_)
        exact = torch.from_numpy(gguf.quants.dequantize(raw, type_).copy())
        return cls(_info(numbers, kind), exact, torch.from_numpy(raw))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.numbers.to(dtype)

    def blocks(self) -> Tensor | None:
        return self.raw


def _info(numbers: Tensor, kind: str) -> TensorInfo:
    return TensorInfo("w", tuple(numbers.shape), kind, Path("w.gguf"), numbers.nbytes)
