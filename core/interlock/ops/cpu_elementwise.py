"""Normalization, activation and rotary embedding on the CPU, each as one pass over memory.

At batch 1 a torch operator costs 5 to 10 microseconds whatever it does, so what matters is that
each of these is one call. Arithmetic is float32; results are rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interlock.ops.cpu_attention import float_bits
from interlock.ops.launch import TASK, Kernel, source_stamp, team
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
    float32,
    fma,
    get,
    jit,
    load,
    mul,
    put,
    rsqrt,
    splat,
    store,
    sub,
    total,
)

LANES = 16
CHUNK = 8
"""Tokens per task."""
SHARED = 1 << 15
"""Elements from which waking the other threads pays."""


@jit
def _squares(x: int, size: int, count: int, kind: int) -> Any:
    """Sum of squares of a row."""
    whole = splat(0.0)
    full = count // LANES * LANES
    for i in range(0, full, LANES):
        value = load(x + size * i, kind)
        whole = fma(value, value, whole)
    result = total(whole)
    for i in range(full, count):
        result += get(x + size * i, kind) * get(x + size * i, kind)
    return result


@jit
def _scale_row(x: int, w: int, out: int, size: int, count: int, factor: float, kind: int) -> None:
    full = count // LANES * LANES
    for i in range(0, full, LANES):
        value = mul(mul(load(x + size * i, kind), splat(factor)), load(w + size * i, kind))
        store(out + size * i, value, kind)
    for i in range(full, count):
        put(out + size * i, get(x + size * i, kind) * factor * get(w + size * i, kind), kind)


@jit
def _add_row(x: int, y: int, out: int, size: int, count: int, kind: int) -> None:
    full = count // LANES * LANES
    for i in range(0, full, LANES):
        store(out + size * i, add(load(x + size * i, kind), load(y + size * i, kind)), kind)
    for i in range(full, count):
        put(out + size * i, get(x + size * i, kind) + get(y + size * i, kind), kind)


def _norm(stamp: int, kind: int) -> Callable[[int], None]:
    """``residual`` 0: normalize x; otherwise write x + residual to ``total`` and normalize that."""
    size = 2 if kind == BF16 else 4

    def kernel(p: int) -> None:
        _ = stamp
        rows, width, x, x_stride = arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        residual, r_stride, weight, summed = arg(p, 6), arg(p, 7), arg(p, 8), arg(p, 9)
        out, eps = arg(p, 10), as_float(arg(p, 11))
        start = fetch_add(p + TASK, CHUNK)
        while start < rows:
            for i in range(start, min(start + CHUNK, rows)):
                source, target = x + i * x_stride, out + i * width * size
                if residual != 0:
                    both = summed + i * width * size
                    _add_row(source, residual + i * r_stride, both, size, width, kind)
                    source = both
                mean = _squares(source, size, width, kind) / float32(width)
                _scale_row(source, weight, target, size, width, rsqrt(mean + eps), kind)
            start = fetch_add(p + TASK, CHUNK)

    return kernel


def _silu(stamp: int, kind: int) -> Callable[[int], None]:
    size = 2 if kind == BF16 else 4

    def kernel(p: int) -> None:
        _ = stamp
        rows, width, x, x_stride, out = arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5), arg(p, 6)
        full = width // LANES * LANES
        one = splat(1.0)
        start = fetch_add(p + TASK, CHUNK)
        while start < rows:
            for r in range(start, min(start + CHUNK, rows)):
                gate = x + r * x_stride
                up, target = gate + width * size, out + r * width * size
                for i in range(0, full, LANES):
                    g = load(gate + size * i, kind)
                    silu = div(g, add(one, exp(sub(splat(0.0), g))))
                    store(target + size * i, mul(silu, load(up + size * i, kind)), kind)
                for i in range(full, width):
                    number = get(gate + size * i, kind)
                    share = first(exp(splat(-number)))
                    number = number / (float32(1) + share) * get(up + size * i, kind)
                    put(target + size * i, number, kind)
            start = fetch_add(p + TASK, CHUNK)

    return kernel


@jit
def _rotate(x: int, cos: int, sin: int, half: int, size: int, out: int, kind: int) -> None:
    """Rotate one head: element i with element i + half (Su et al. 2021, half-split layout)."""
    full = half // LANES * LANES
    for i in range(0, full, LANES):
        a, b = load(x + size * i, kind), load(x + size * (half + i), kind)
        c, s = load(cos + 4 * i, F32), load(sin + 4 * i, F32)
        store(out + size * i, sub(mul(a, c), mul(b, s)), kind)
        store(out + size * (half + i), add(mul(b, c), mul(a, s)), kind)
    for i in range(full, half):
        p, q = get(x + size * i, kind), get(x + size * (half + i), kind)
        c1, s1 = get(cos + 4 * i, F32), get(sin + 4 * i, F32)
        put(out + size * i, p * c1 - q * s1, kind)
        put(out + size * (half + i), q * c1 + p * s1, kind)


@jit
def _copy(x: int, out: int, count: int, size: int, kind: int) -> None:
    for i in range(count):
        put(out + size * i, get(x + size * i, kind), kind)


def _rope(stamp: int, kind: int) -> Callable[[int], None]:
    size = 2 if kind == BF16 else 4

    def kernel(p: int) -> None:
        _ = stamp
        tokens, qkv, stride, table = arg(p, 2), arg(p, 3), arg(p, 4), arg(p, 5)
        positions, slots = arg(p, 6), arg(p, 7)
        k_cache, v_cache, heads, groups, half = (
            arg(p, 8), arg(p, 9), arg(p, 10), arg(p, 11), arg(p, 12),
        )  # fmt: skip
        head = 2 * half * size
        start = fetch_add(p + TASK, CHUNK)
        while start < tokens:
            for t in range(start, min(start + CHUNK, tokens)):
                row = qkv + t * stride
                cos = table + 8 * half * arg(positions, t)
                sin = cos + 4 * half
                for h in range(heads):
                    _rotate(row + h * head, cos, sin, half, size, row + h * head, kind)
                slot = arg(slots, t)
                if slot >= 0:
                    keys, values = row + heads * head, row + (heads + groups) * head
                    at = slot * groups * head
                    for g in range(groups):
                        _rotate(
                            keys + g * head, cos, sin, half, size, k_cache + at + g * head, kind
                        )
                    _copy(values, v_cache + at, groups * 2 * half, size, kind)
            start = fetch_add(p + TASK, CHUNK)

    return kernel


class Elementwise:
    """The element-wise ops of the op table for one dtype; see `interlock.ops.reference`."""

    def __init__(self, dtype: torch.dtype) -> None:
        kind = BF16 if dtype == torch.bfloat16 else F32
        self._norm, self._silu, self._rope = _kernels(kind)
        self._team = team()

    def _threads(self, elements: int) -> int:
        return self._team.size if elements >= SHARED else 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(
            self._threads(x.numel()), *x.shape, x.data_ptr(), _stride(x), 0, 0, weight.data_ptr(),
            0, out.data_ptr(), float_bits(eps),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, residual = _rows(x), _rows(residual)
        out, summed = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._norm(
            self._threads(x.numel()), *x.shape, x.data_ptr(), _stride(x), residual.data_ptr(),
            _stride(residual), weight.data_ptr(), summed.data_ptr(), out.data_ptr(),
            float_bits(eps),
        )  # fmt: skip
        return out, summed

    def silu_mul(self, x: Tensor) -> Tensor:
        x = _rows(x)
        width = x.shape[1] // 2
        out = torch.empty((x.shape[0], width), dtype=x.dtype)
        self._silu(
            self._threads(x.numel()), x.shape[0], width, x.data_ptr(), _stride(x), out.data_ptr()
        )
        return out

    def rope_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> Tensor:
        tokens, half = qkv.shape[0], cos_sin.shape[2]
        self._rope(
            self._threads(qkv.numel()), tokens, qkv.data_ptr(), _stride(qkv), cos_sin.data_ptr(),
            positions.data_ptr(), slot_mapping.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            num_heads, num_kv_heads, half,
        )  # fmt: skip
        return qkv.view(tokens, -1, 2 * half)[:, :num_heads]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _stride(x: Tensor) -> int:
    return x.stride(0) * x.element_size()


@functools.cache
def _kernels(kind: int) -> tuple[Kernel, Kernel, Kernel]:
    stamp = source_stamp()
    return Kernel(_norm(stamp, kind)), Kernel(_silu(stamp, kind)), Kernel(_rope(stamp, kind))
