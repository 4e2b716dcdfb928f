"""Products of tokens with MXFP4 weights on a CPU with AVX-512, from the packed weights (numba).

A weight lies in panels of 64 outputs. Per panel and group of 32 inputs: 64 scale bytes, then for
each quarter (8 inputs) 64 words of two 16-bit lanes, where lane ``pair`` of a word holds input
``8 * quarter + 2 * nibble + pair`` in its ``nibble``: 1,088 bytes for 2,048 weights, 4.25 bits
each.

A group's 32 products with the unscaled elements (small numbers, exact in bf16) are summed in
float32, and the sum enters the output's float32 sum times the scale, a power of two. Many rows
share the work of looking elements up: they are written to a scratch panel once. Both ways add the
same numbers in the same order, so a row's bits depend neither on its neighbours nor on how many
there are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from interlock.ops import cpu_linear
from interlock.ops.cpu_linear import KINDS, PANEL, ROWS, nibbles, pad_panels, write_tile
from interlock.ops.launch import TASK, THREAD, Kernel, cpu_features, source_stamp, team
from interlock.ops.simd import (
    BF16,
    CONST,
    INT,
    LANES,
    VF32,
    VI32,
    VOID,
    ZERO,
    Builder,
    Value,
    arg,
    call_ir,
    fetch_add,
    fma_ir,
    jit,
    load_at,
    routine,
    splat_ir,
    store_at,
)
from interlock.ops.tiles import Loop, grid, multiply, offset, word
from interlock.weights.packed_fp4 import E2M1
from interlock.weights.quantization import GROUP

VECTORS = PANEL // LANES
SCALES = PANEL
"""Bytes of the scales of one panel and group, which lie before the codes."""
CODES = PANEL * GROUP // 2
BLOCK = 192
"""Rows per task: a multiple of `ROWS`; more would leave cores idle at the end of a product."""
UNPACK_FROM = 48
"""Rows from which looking elements up once costs less than for every `ROWS` rows anew."""

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VI8, _VI16 = ir.VectorType(_I8, LANES), ir.VectorType(_I16, 2 * LANES)


def _unpacked_bytes(kind: int) -> int:
    """Of one panel's group in scratch memory: a word per two inputs in bf16, per one in float32."""
    return PANEL * GROUP * (2 if kind == BF16 else 4)


def _scale(b: Builder, address: Value) -> Value:
    """16 scales as float32: the byte is the exponent, and 0 is 2^-127, which is subnormal."""
    bits = b.zext(load_at(b, address, _VI8), VI32)
    zero = b.icmp_signed("==", bits, splat_ir(b, _I32(0)))
    shifted = b.shl(bits, splat_ir(b, _I32(23)))
    return b.bitcast(b.select(zero, splat_ir(b, _I32(1 << 22)), shifted), VF32)


def _table(b: Builder, address: Value, kind: int) -> Value:
    return load_at(b, address, _VI16 if kind == BF16 else VF32)


def _elements(b: Builder, codes: Value, nibble: int, table: Value, kind: int) -> list[Value]:
    """Words of the inputs in one nibble of ``codes``: one of bf16 pairs, or two of float32."""
    if kind == BF16:
        shift = ir.Constant(_VI16, [4 * nibble] * 2 * LANES)
        lanes = b.lshr(b.bitcast(codes, _VI16), shift)
        # Only the low five bits of an index count, and the table repeats after 16 entries.
        found = call_ir(b, "llvm.x86.avx512.permvar.hi.512", _VI16, table, lanes)
        return [b.bitcast(found, VI32)]
    words = []
    for half in (0, 16):
        index = b.lshr(codes, splat_ir(b, _I32(half + 4 * nibble)))
        found = call_ir(b, "llvm.x86.avx512.permvar.sf.512", VF32, table, index)
        words.append(b.bitcast(found, VI32))
    return words


def _lookup(b: Builder, group: Value, table: Value, kind: int) -> Any:
    """Yield, in the order of inputs, the four vectors of words of a packed group."""
    for quarter in range(4):
        at = offset(b, group, SCALES + 4 * PANEL * quarter)
        codes = [load_at(b, offset(b, at, 64 * j), VI32) for j in range(VECTORS)]
        for nibble in range(4):
            words = [_elements(b, each, nibble, table, kind) for each in codes]
            yield from zip(*words, strict=True)


def _scratch(b: Builder, group: Value, kind: int) -> Any:
    """The same of a group that was written to scratch memory by `unpack_group`."""
    for index in range(_unpacked_bytes(kind) // (4 * PANEL)):
        yield [
            load_at(b, offset(b, group, 4 * PANEL * index + 64 * j), VI32) for j in range(VECTORS)
        ]


def _group_sums(
    b: Builder, fetched: Any, inputs: Value, lda: Value, m: int, kind: int
) -> list[Value]:
    """Sums of input times element over a group, for ``m`` rows and 64 outputs."""
    acc = [ZERO] * (m * VECTORS)
    for index, right in enumerate(fetched):
        step = offset(b, inputs, 4 * index)
        left = [word(b, b.add(step, b.mul(lda, _I64(i)))) for i in range(m)]
        acc = [
            multiply(b, total, left[i], right[j], kind)
            for total, (i, j) in zip(acc, grid(m, VECTORS), strict=True)
        ]
    return acc


def _tile(m: int, unpacked: bool) -> Any:
    """``c[m, 64] = a[m, K] @ w[64, K].T`` for one panel.

    Arguments: address and row stride of a; address of the packed panel; of the scratch panel;
    groups; address of the table; address and row stride of c (float32); kind.
    """

    @routine(VOID, INT, INT, INT, INT, INT, INT, INT, INT, CONST)
    def tile(b: Builder, pa: Value, lda: Value, packed: Value, *rest: Any) -> None:
        scratch, groups, table, pc, ldc, kind = rest
        size = GROUP * (2 if kind == BF16 else 4)
        values = None if unpacked else _table(b, table, kind)
        with Loop(b, groups, [ZERO] * (m * VECTORS)) as loop:
            group = b.add(packed, b.mul(loop.index, _I64(SCALES + CODES)))
            inputs = b.add(pa, b.mul(loop.index, _I64(size)))
            if unpacked:
                at = b.add(scratch, b.mul(loop.index, _I64(_unpacked_bytes(kind))))
                fetched = _scratch(b, at, kind)
            else:
                fetched = _lookup(b, group, values, kind)
            sums = _group_sums(b, fetched, inputs, lda, m, kind)
            scales = [_scale(b, offset(b, group, LANES * j)) for j in range(VECTORS)]
            loop.next = [
                fma_ir(b, total, scales[j], acc)
                for acc, total, (_, j) in zip(loop.values, sums, grid(m, VECTORS), strict=True)
            ]
        for value, (i, j) in zip(loop.result, grid(m, VECTORS), strict=True):
            store_at(b, value, offset(b, b.add(pc, b.mul(ldc, _I64(i))), 64 * j))

    return tile


@routine(VOID, INT, INT, INT, INT, CONST)
def unpack_panel(
    b: Builder, packed: Value, groups: Value, table: Value, scratch: Value, kind: int
) -> None:
    """Write a panel's elements, unscaled, in the order in which tiles of rows read them."""
    values = _table(b, table, kind)
    with Loop(b, groups, []) as loop:
        group = b.add(packed, b.mul(loop.index, _I64(SCALES + CODES)))
        at = b.add(scratch, b.mul(loop.index, _I64(_unpacked_bytes(kind))))
        for index, words in enumerate(_lookup(b, group, values, kind)):
            for j, each in enumerate(words):
                store_at(b, each, offset(b, at, 4 * PANEL * index + 64 * j))
        loop.next = []


def _rows_of(unpacked: bool) -> Any:
    """One tile of ``m`` (1 to 6) rows by 64 outputs, put together from tiles of fixed heights."""
    t1, t2, t3, t4, t6 = (_tile(m, unpacked) for m in (1, 2, 3, 4, 6))

    @jit
    def rows(
        a: int, lda: int, w: int, s: int, groups: int, table: int, c: int, ldc: int, m: int,
        kind: int,
    ) -> None:  # fmt: skip
        if m == 6:
            t6(a, lda, w, s, groups, table, c, ldc, kind)
            return
        if m >= 4:
            t4(a, lda, w, s, groups, table, c, ldc, kind)
            a, c, m = a + 4 * lda, c + 4 * ldc, m - 4
        if m == 3:
            t3(a, lda, w, s, groups, table, c, ldc, kind)
        elif m == 2:
            t2(a, lda, w, s, groups, table, c, ldc, kind)
        elif m == 1:
            t1(a, lda, w, s, groups, table, c, ldc, kind)

    return rows


_packed_rows = _rows_of(unpacked=False)
_unpacked_rows = _rows_of(unpacked=True)


def _product(stamp: int, kind: int) -> Callable[[int], None]:
    def kernel(p: int) -> None:
        _ = stamp
        segments, count, groups, panels = arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        a, lda, w, out, ldo, columns = (
            arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9), arg(p, 10), arg(p, 11),
        )  # fmt: skip
        bias, table, many = arg(p, 12), arg(p, 13), arg(p, 14)
        tile = arg(p, 15) + fetch_add(p + THREAD, 1) * arg(p, 16)
        scratch = tile + 4 * PANEL * ROWS
        size = 2 if kind == BF16 else 4
        bytes_each = groups * (SCALES + CODES)
        tasks = panels * count
        task = fetch_add(p + TASK, 1)
        while task < tasks:
            segment, panel = segments + 24 * (task // panels), task % panels
            start, rows, matrix = arg(segment, 0), arg(segment, 1), arg(segment, 2)
            b = w + (matrix * panels + panel) * bytes_each
            width = min(PANEL, columns - panel * PANEL)
            shift = bias + 4 * PANEL * panel if bias != 0 else 0
            if rows >= many:
                unpack_panel(b, groups, table, scratch, kind)
            for i in range(start, start + rows, ROWS):
                m = min(ROWS, start + rows - i)
                if rows >= many:
                    _unpacked_rows(
                        a + i * lda, lda, b, scratch, groups, table, tile, 4 * PANEL, m, kind
                    )
                else:
                    _packed_rows(
                        a + i * lda, lda, b, scratch, groups, table, tile, 4 * PANEL, m, kind
                    )
                at = out + i * ldo + panel * PANEL * size
                write_tile(tile, m, shift, at, ldo, width, kind)
            task = fetch_add(p + TASK, 1)

    return kernel


@functools.cache
def _stamp() -> int:
    """A change of this file or of the core's kernels compiles anew: see `source_stamp`."""
    own = hashlib.sha256(Path(__file__).read_bytes()).digest()
    return source_stamp() ^ int.from_bytes(own[:6], "little")


@functools.cache
def product_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel(_product(_stamp(), KINDS[dtype]))


def unsupported(dtype: torch.dtype) -> str | None:
    """Why `product` cannot run for activations of ``dtype`` on this CPU, or None."""
    problem = cpu_linear.dense_unsupported(dtype, GROUP)
    if problem is None and dtype == torch.bfloat16 and "avx512bw" not in cpu_features():
        return "the CPU has no avx512bw"
    return problem


def pack_panels(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes uint8 [N, K / 2] and scale uint8 [N, K / 32] to uint8 [panels, K / 32, 1088]."""
    panels = -(-len(codes) // PANEL)
    head = pad_panels(scale).view(panels, PANEL, -1).transpose(1, 2)
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    body = nibbles(pad_panels(values), panels).reshape(panels, head.shape[1], -1)
    return torch.cat([head, body.contiguous().view(torch.uint8)], dim=-1)


@functools.cache
def element_table(dtype: torch.dtype) -> Tensor:
    """The 16 elements, twice for bf16."""
    values = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor(values * (2 if dtype == torch.bfloat16 else 1), dtype=dtype)


def product(
    x: Tensor,
    packed: Tensor,
    segments: Tensor,
    columns: int,
    bias: Tensor | None = None,
    many: int = UNPACK_FROM,
) -> Tensor:
    """Products of runs of rows with one of several matrices each: [R, N] in x's dtype.

    x [R, K]; packed uint8 [E, panels, K / 32, 1088]; segments int64 [S, 3] of (first row, rows,
    matrix), at most `BLOCK` rows each; bias float32 padded to whole panels. Rows in no segment
    are left as they were allocated. From ``many`` rows of a segment on it is unpacked first.
    """
    rows, inputs = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, columns), dtype=x.dtype)
    threads, groups = team(), inputs // GROUP
    kind = KINDS[x.dtype]
    scratch, stride = threads.scratch(4 * PANEL * ROWS + groups * _unpacked_bytes(kind))
    product_kernel(x.dtype)(
        threads.size, segments.data_ptr(), len(segments), groups, packed.shape[-3],
        x.data_ptr(), x.stride(0) * x.element_size(), packed.data_ptr(),
        out.data_ptr(), columns * x.element_size(), columns,
        0 if bias is None else bias.data_ptr(), element_table(x.dtype).data_ptr(), many,
        scratch, stride,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=1024)
def whole(rows: int) -> Tensor:
    """Segments of one matrix for all rows; not to be changed."""
    starts = torch.arange(0, rows, BLOCK)
    sizes = (rows - starts).clamp_max(BLOCK)
    return torch.stack([starts, sizes, torch.zeros_like(starts)], dim=1)
