"""Register tiles: the inner loops of the matrix products and of decode attention.

A *panel* holds 64 output columns of a weight (or 64 keys): for each 4 bytes of the inner
dimension (a pair of bf16, or one float32) 64 words of 4 bytes, so that a tile streams it in order.
The order of additions for one output depends on neither the tile's height nor its place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from interlock.ops.simd import (
    BF16,
    CONST,
    INT,
    LANES,
    VEC,
    VF32,
    VI32,
    VOID,
    ZERO,
    BFloat,
    Builder,
    Value,
    call_ir,
    fma_ir,
    load_at,
    routine,
    splat_ir,
    store_at,
)

GROUP = 32
"""Inputs per quantization group: one scale and one minimum for 32 weights of a row."""

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI16 = ir.VectorType(_I16, 2 * LANES)
_VHALF = ir.VectorType(ir.HalfType(), LANES)
_VPAIR = ir.VectorType(BFloat(), 2 * LANES)
_HALF_CHUNK = ir.VectorType(_I16, LANES)


def offset(b: Builder, address: Value, size: int) -> Value:
    return b.add(address, _I64(size))


def _dot(b: Builder, acc: Value, left: Value, right: Value) -> Value:
    return call_ir(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, acc, left, right)


def multiply(b: Builder, acc: Value, left: Value, right: Value, kind: int) -> Value:
    """Sum of acc and left * right over words of 4 bytes, given as vectors of int32."""
    if kind == BF16:
        return _dot(b, acc, b.bitcast(left, _VPAIR), b.bitcast(right, _VPAIR))
    return fma_ir(b, b.bitcast(left, VF32), b.bitcast(right, VF32), acc)


class Loop:
    """A counted loop that carries values in registers; the body assigns ``next``."""

    def __init__(self, b: Builder, count: Value, carried: list[Value]) -> None:
        self.b, self.count, self.start = b, count, carried
        self.next: list[Value] = []

    def __enter__(self) -> Loop:
        b = self.b
        self.entry = b.block
        self.body = b.append_basic_block("tile")
        self.end = b.append_basic_block("tile.end")
        b.cbranch(b.icmp_signed(">", self.count, _I64(0)), self.body, self.end)
        b.position_at_end(self.body)
        self.index = b.phi(_I64)
        self.index.add_incoming(_I64(0), self.entry)
        self.values = [b.phi(v.type) for v in self.start]
        for phi, value in zip(self.values, self.start, strict=True):
            phi.add_incoming(value, self.entry)
        return self

    def __exit__(self, *error: object) -> None:
        b, last = self.b, self.b.block
        following = b.add(self.index, _I64(1))
        self.index.add_incoming(following, last)
        for phi, value in zip(self.values, self.next, strict=True):
            phi.add_incoming(value, last)
        b.cbranch(b.icmp_signed("<", following, self.count), self.body, self.end)
        b.position_at_end(self.end)
        self.result = [b.phi(v.type) for v in self.start]
        for phi, start, value in zip(self.result, self.start, self.next, strict=True):
            phi.add_incoming(start, self.entry)
            phi.add_incoming(value, last)


def grid(m: int, n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(m) for j in range(n)]


def word(b: Builder, address: Value) -> Value:
    return splat_ir(b, load_at(b, address, _I32))


def dense_tile(m: int, n: int) -> Any:
    """``c[m, 16n] = keep * c + a @ panel``: float32 sums of bf16 or float32 products.

    Arguments: address and row stride of a; address of the panel and its stride per word of the
    inner dimension; inner words; address and row stride of c (float32); keep (0 or 1); kind.
    """

    @routine(VOID, INT, INT, INT, INT, INT, INT, INT, INT, CONST)
    def tile(b: Builder, pa: Value, lda: Value, pb: Value, ldb: Value, *rest: Any) -> None:
        words, pc, ldc, keep, kind = rest
        rows = [b.add(pc, b.mul(ldc, _I64(i))) for i in range(m)]
        kept = b.icmp_signed("!=", keep, _I64(0))
        olds = [load_at(b, offset(b, rows[i], 64 * j), VF32) for i, j in grid(m, n)]
        with Loop(b, words, [b.select(kept, old, ZERO) for old in olds]) as loop:
            column = b.add(pb, b.mul(loop.index, ldb))
            right = [load_at(b, offset(b, column, 64 * j), VI32) for j in range(n)]
            step = b.add(pa, b.mul(loop.index, _I64(4)))
            left = [word(b, b.add(step, b.mul(lda, _I64(i)))) for i in range(m)]
            loop.next = [
                multiply(b, acc, left[i], right[j], kind)
                for acc, (i, j) in zip(loop.values, grid(m, n), strict=True)
            ]
        for value, (i, j) in zip(loop.result, grid(m, n), strict=True):
            store_at(b, value, offset(b, rows[i], 64 * j))

    return tile


def grouped_tile(m: int, n: int, planes: int) -> Any:
    """``c[m, 16n] = a[m, K] @ w[16n, K].T`` for bf16 a and w of 4-bit planes in groups of 32.

    Per group: ``c += scale * sum(a * value) + minimum * sum(a)``. Products are exact, all sums
    are float32. Arguments: address and row stride of a; address of the panel (its layout is in
    `interlock.ops.cpu_linear`); groups; address of the group sums of a (float32 [m, groups]);
    address of the value tables (bf16 [planes, 32]); address and row stride of c.
    """

    @routine(VOID, INT, INT, INT, INT, INT, INT, INT, INT)
    def tile(b: Builder, pa: Value, lda: Value, pw: Value, groups: Value, *rest: Value) -> None:
        sums, tables, pc, ldc = rest
        table = [load_at(b, offset(b, tables, 64 * p), _VI16) for p in range(planes)]
        header = 64 * n
        stride = b.mul(groups, _I64(4))
        with Loop(b, groups, [ZERO] * (m * n)) as loop:
            group = b.add(pw, b.mul(loop.index, _I64(header + planes * 256 * n)))
            inputs = b.add(pa, b.mul(loop.index, _I64(2 * GROUP)))
            dots = _group_dots(b, inputs, lda, offset(b, group, header), table, m, n)
            at = b.add(sums, b.mul(loop.index, _I64(4)))
            whole = [
                splat_ir(b, load_at(b, b.add(at, b.mul(stride, _I64(i))), _F32)) for i in range(m)
            ]
            scale = [_half(b, offset(b, group, 32 * j)) for j in range(n)]
            low = [_half(b, offset(b, group, 32 * (n + j))) for j in range(n)]
            loop.next = [
                fma_ir(b, whole[i], low[j], fma_ir(b, dots[i, j], scale[j], acc))
                for acc, (i, j) in zip(loop.values, grid(m, n), strict=True)
            ]
        for value, (i, j) in zip(loop.result, grid(m, n), strict=True):
            store_at(b, value, offset(b, b.add(pc, b.mul(ldc, _I64(i))), 64 * j))

    return tile


def _half(b: Builder, address: Value) -> Value:
    return b.fpext(load_at(b, address, _VHALF), VF32)


def _group_dots(
    b: Builder, inputs: Value, lda: Value, packed: Value, table: list[Value], m: int, n: int
) -> dict[tuple[int, int], Value]:
    """Sums of input times looked-up value over one group; a 16-bit lane holds four nibbles."""
    acc: dict[tuple[int, int], Value] = dict.fromkeys(grid(m, n), ZERO)
    planes = len(table)
    for quarter in range(4):
        at = offset(b, packed, 64 * n * planes * quarter)
        words = {
            (p, j): load_at(b, offset(b, at, 64 * (p * n + j)), _VI16)
            for p in range(planes)
            for j in range(n)
        }
        for nibble in range(4):
            step = offset(b, inputs, 4 * (4 * quarter + nibble))
            left = [word(b, b.add(step, b.mul(lda, _I64(i)))) for i in range(m)]
            shift = ir.Constant(_VI16, [4 * nibble] * 2 * LANES)
            for (p, j), lanes in words.items():
                # Only the low five bits of an index count, and tables repeat after 16 entries.
                right = call_ir(
                    b, "llvm.x86.avx512.permvar.hi.512", _VI16, table[p], b.lshr(lanes, shift)
                )
                for i in range(m):
                    acc[i, j] = multiply(b, acc[i, j], left[i], right, BF16)
    return acc


def _chunks(head_dim: int, kind: int) -> list[tuple[int, int]]:
    """(first element, vectors of output) per 64 bytes of a head; the last may be half filled."""
    if kind == BF16:
        return [(d, min(2, (head_dim - d) // LANES)) for d in range(0, head_dim, 2 * LANES)]
    return [(d, 1) for d in range(0, head_dim, LANES)]


def _head_chunk(b: Builder, address: Value, first: int, filled: int, kind: int) -> Value:
    if kind != BF16:
        return load_at(b, offset(b, address, 4 * first), VI32)
    at = offset(b, address, 2 * first)
    if filled == 2:
        return load_at(b, at, VI32)
    half = load_at(b, at, _HALF_CHUNK)
    order = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(2 * LANES)))
    zero = ir.Constant(_HALF_CHUNK, [0] * LANES)
    return b.bitcast(b.shuffle_vector(half, zero, order), VI32)


def _transposed_sum(b: Builder, rows: list[Value]) -> Value:
    """Lane i of the result is the sum of the lanes of ``rows[i]``, in one fixed order."""
    width = 1
    while len(rows) > 1:
        low, high = _lanes(width, 0), _lanes(width, width)
        rows = [
            b.fadd(
                b.shuffle_vector(x, y, ir.Constant(VI32, low)),
                b.shuffle_vector(x, y, ir.Constant(VI32, high)),
            )
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
        width *= 2
    return rows[0]


def _lanes(width: int, shift: int) -> list[int]:
    out: list[int] = []
    for start in range(0, LANES, 2 * width):
        run = [start + shift + i for i in range(width)]
        out += run + [LANES + i for i in run]
    return out


@routine(VEC, INT, INT, INT, CONST, CONST)
def scores(b: Builder, base: Value, offsets: Value, q: Value, head_dim: int, kind: int) -> Value:
    """Products q . k of 16 keys; key i lies at ``base`` plus the int64 ``offsets[i]``."""
    chunks = _chunks(head_dim, kind)
    query = [_head_chunk(b, q, d, n, kind) for d, n in chunks]
    rows = []
    for i in range(LANES):
        key = b.add(base, load_at(b, offset(b, offsets, 8 * i), _I64))
        acc = ZERO
        for part, (d, n) in zip(query, chunks, strict=True):
            acc = multiply(b, acc, part, _head_chunk(b, key, d, n, kind), kind)
        rows.append(acc)
    return _transposed_sum(b, rows)


@routine(VOID, INT, INT, INT, INT, INT, INT, CONST, CONST, CONST)
def weigh(b: Builder, base: Value, offsets: Value, runs: Value, *rest: Any) -> None:
    """``out[g] = p[g] @ v`` over ``16 * runs`` rows of v, for every head g of a group.

    Arguments: address of v; int64 offsets of its rows; runs of 16 rows; weights p (``kind``
    [G, any]) and their row stride in bytes; out (float32 [G, head_dim]); G; head_dim; kind.
    """
    p, stride, out, group, head_dim, kind = rest
    for first, filled in _chunks(head_dim, kind):
        for start in range(0, group, 8):
            heads = list(range(start, min(start + 8, group)))
            with Loop(b, runs, [ZERO] * (len(heads) * filled)) as loop:
                at = b.add(offsets, b.mul(loop.index, _I64(8 * LANES)))
                rows = [b.add(base, load_at(b, offset(b, at, 8 * i), _I64)) for i in range(LANES)]
                step = b.mul(loop.index, _I64(LANES * (2 if kind == BF16 else 4)))
                weights = [b.add(b.add(p, b.mul(stride, _I64(g))), step) for g in heads]
                loop.next = _weigh_run(b, rows, (first, filled), weights, loop.values, kind)
            places = [(g, j) for g in heads for j in range(filled)]
            for (g, j), value in zip(places, loop.result, strict=True):
                store_at(b, value, offset(b, out, 4 * (g * head_dim + first + LANES * j)))


def _weigh_run(
    b: Builder,
    rows: list[Value],
    chunk: tuple[int, int],
    weights: list[Value],
    values: list[Value],
    kind: int,
) -> list[Value]:
    """Add 16 weighted rows to ``values``, which lie head by head."""
    acc = list(values)
    filled = chunk[1]
    step = 2 if kind == BF16 else 1
    for i in range(0, LANES, step):
        words = _value_words(b, rows[i : i + step], *chunk, kind)
        for g, address in enumerate(weights):
            weight = word(b, offset(b, address, 4 * i // step))
            for j, pair in enumerate(words):
                k = g * filled + j
                acc[k] = multiply(b, acc[k], weight, pair, kind)
    return acc


def _value_words(b: Builder, rows: list[Value], first: int, filled: int, kind: int) -> list[Value]:
    """Vectors of words: for bf16 each word pairs the same element of two rows."""
    if kind != BF16:
        return [_head_chunk(b, rows[0], first, filled, kind)]
    wide = ir.VectorType(_I16, 2 * LANES)
    x, y = (b.bitcast(_head_chunk(b, r, first, filled, kind), wide) for r in rows)
    out = []
    for j in range(filled):
        order = [k for i in range(LANES) for k in (16 * j + i, 32 + 16 * j + i)]
        mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), order)
        out.append(b.bitcast(b.shuffle_vector(x, y, mask), VI32))
    return out


@routine(VOID, INT, INT, INT, CONST, CONST)
def pair_rows(b: Builder, x: Value, y: Value, out: Value, head_dim: int, kind: int) -> None:
    """Store two rows as [head_dim] words, element beside element; float32 takes ``x`` only."""
    for first, filled in _chunks(head_dim, kind):
        for j, words in enumerate(_value_words(b, [x, y], first, filled, kind)):
            store_at(b, words, offset(b, out, 4 * (first + LANES * j)))
