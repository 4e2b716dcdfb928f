"""A 16-lane float32 vector type for numba kernels, and the memory access they need.

Plain numba loops leave vectorization to LLVM's judgement; here a kernel says what it wants:
``acc = fma(load(x, BF16), load(y, BF16), acc)``. Addresses are int64, sizes are bytes. The IR is
generic: on a CPU without AVX-512 LLVM splits each vector into what the CPU has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 16
BF16, F32 = 1, 0
"""The ``kind`` of memory that `load`, `store`, `get` and `put` convert from and to."""

# numba is typed in part only, and differently from version to version.
_Type: Any = types.Type

F = TypeVar("F", bound=Callable[..., Any])

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()


def jit(function: F) -> F:
    """A helper that kernels call; compiled into each kernel that uses it."""
    return cast(F, numba.njit(error_model="numpy")(function))


class BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite knows no bf16; LLVM's name for it is all that the IR needs."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


VF32 = ir.VectorType(_FLOAT, LANES)
VI32 = ir.VectorType(_I32, LANES)
VBF16 = ir.VectorType(BFloat(), LANES)
Builder: TypeAlias = Any
Value: TypeAlias = Any


def vector(numbers: Sequence[float]) -> Value:
    return ir.Constant(VF32, list(numbers))


ZERO = vector([0.0] * LANES)


def load_at(b: Builder, address: Value, kind: ir.Type) -> Value:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store_at(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def splat_ir(b: Builder, scalar: Value) -> Value:
    kind = ir.VectorType(scalar.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(nothing, scalar, _I32(0))
    return b.shuffle_vector(first, nothing, ir.Constant(VI32, [0] * LANES))


def call_ir(b: Builder, name: str, result: ir.Type, *args: Value) -> Value:
    """Call the LLVM intrinsic ``name``."""
    function = b.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [a.type for a in args])
        function = ir.Function(b.module, kind, name)
    return b.call(function, args)


def fma_ir(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return call_ir(b, "llvm.fma.v16f32", VF32, x, y, z)


class _Vec(_Type):  # type: ignore[misc]
    pass


VEC: Any = _Vec("Vec16f32")


@register_model(_Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        init: Any = super().__init__
        init(manager, kind, VF32)


def routine(result: Any, *params: Any) -> Callable[[Callable[..., Value]], Any]:
    """Turn ``emit(builder, *values) -> value`` into a function that kernels can call.

    A parameter ``"const"`` is a compile-time int and reaches ``emit`` as a Python int.
    """

    def decorate(emit: Callable[..., Value]) -> Any:
        arity = len(params)

        def typing(given: Sequence[Any]) -> Any:
            # The signature keeps literal types: numba finds an intrinsic's code by signature.
            kinds = [t if p == "const" else p for p, t in zip(params, given, strict=True)]
            fixed = {
                i: t.literal_value
                for i, (p, t) in enumerate(zip(params, given, strict=True))
                if p == "const"
            }

            def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
                values = [fixed.get(i, a) for i, a in enumerate(args)]
                out = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else out

            return result(*kinds), codegen

        return _INTRINSIC[arity](typing)

    return decorate


def _intrinsic_of(arity: int) -> Callable[[Any], Any]:
    """One builder per arity, as numba reads an intrinsic's parameters from its signature."""
    names = ", ".join(f"a{i}" for i in range(arity))
    source = f"lambda typing: lambda context, {names}: typing(({names},))"
    make = eval(source, {})  # noqa: S307

    def build(typing: Any) -> Any:
        return intrinsic(prefer_literal=True)(make(typing))

    return build


_INTRINSIC = {n: _intrinsic_of(n) for n in range(1, 12)}

INT, FLOAT, VOID, CONST = types.int64, types.float32, types.void, "const"


@routine(INT, INT, INT)
def fetch_add(b: Builder, address: Value, amount: Value) -> Value:
    """Atomically add to the int64 at ``address``; returns what was there."""
    return b.atomic_rmw("add", b.inttoptr(address, _I64.as_pointer()), amount, "acq_rel")


@routine(INT, INT, INT)
def arg(b: Builder, p: Value, index: Value) -> Value:
    """The int64 number ``index`` of the array at ``p``."""
    return load_at(b, b.add(p, b.mul(index, _I64(8))), _I64)


@routine(VOID, INT)
def prefetch(b: Builder, address: Value) -> None:
    """Ask for the cache line at ``address``, which need not be valid memory."""
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    hints = [_I32(0), _I32(2), _I32(1)]
    kind = ir.FunctionType(ir.VoidType(), [pointer.type] + [_I32] * 3)
    function = b.module.globals.get("llvm.prefetch.p0")
    b.call(function or ir.Function(b.module, kind, "llvm.prefetch.p0"), [pointer, *hints])


@routine(VOID, INT, INT)
def set_int(b: Builder, address: Value, value: Value) -> None:
    store_at(b, value, address)


@routine(VOID, INT, INT)
def set_int32(b: Builder, address: Value, value: Value) -> None:
    store_at(b, b.trunc(value, _I32), address)


@routine(INT, INT, INT)
def int32_at(b: Builder, p: Value, index: Value) -> Value:
    return b.sext(load_at(b, b.add(p, b.mul(index, _I64(4))), _I32), _I64)


@routine(FLOAT, INT)
def as_float(b: Builder, bits: Value) -> Value:
    """The float32 whose bits are the low half of an int64 argument."""
    return b.bitcast(b.trunc(bits, _I32), _FLOAT)


@routine(FLOAT, INT)
def float32(b: Builder, value: Value) -> Value:
    return b.sitofp(value, _FLOAT)


@routine(FLOAT, FLOAT)
def rsqrt(b: Builder, value: Value) -> Value:
    return b.fdiv(_FLOAT(1.0), call_ir(b, "llvm.sqrt.f32", _FLOAT, value))


@routine(FLOAT, INT, CONST)
def get(b: Builder, address: Value, kind: int) -> Value:
    """One number of ``kind`` as float32."""
    if kind == F32:
        return load_at(b, address, _FLOAT)
    return b.fpext(load_at(b, address, BFloat()), _FLOAT)


@routine(VOID, INT, FLOAT, CONST)
def put(b: Builder, address: Value, value: Value, kind: int) -> None:
    store_at(b, value if kind == F32 else b.fptrunc(value, BFloat()), address)


@routine(VEC, INT, CONST)
def load(b: Builder, address: Value, kind: int) -> Value:
    """16 numbers of ``kind`` as float32."""
    if kind == F32:
        return load_at(b, address, VF32)
    return b.fpext(load_at(b, address, VBF16), VF32)


@routine(VOID, INT, VEC, CONST)
def store(b: Builder, address: Value, value: Value, kind: int) -> None:
    """Round to nearest even and store."""
    store_at(b, value if kind == F32 else b.fptrunc(value, VBF16), address)


@routine(VEC, FLOAT)
def splat(b: Builder, value: Value) -> Value:
    return splat_ir(b, value)


@routine(VEC, VEC, VEC, VEC)
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """``x * y + z``, rounded once."""
    return fma_ir(b, x, y, z)


@routine(VEC, VEC, VEC)
def add(b: Builder, x: Value, y: Value) -> Value:
    return b.fadd(x, y)


@routine(VEC, VEC, VEC)
def sub(b: Builder, x: Value, y: Value) -> Value:
    return b.fsub(x, y)


@routine(VEC, VEC, VEC)
def mul(b: Builder, x: Value, y: Value) -> Value:
    return b.fmul(x, y)


@routine(VEC, VEC, VEC)
def div(b: Builder, x: Value, y: Value) -> Value:
    return b.fdiv(x, y)


@routine(VEC, VEC, VEC)
def larger(b: Builder, x: Value, y: Value) -> Value:
    """Lane maximum; a NaN in ``x`` or ``y`` may be lost, so softmax sums must carry it."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@routine(VEC, VEC, INT, FLOAT)
def keep_first(b: Builder, x: Value, count: Value, other: Value) -> Value:
    """Lanes from ``count`` on become ``other``; ``count`` may lie outside 0..16."""
    lanes = ir.Constant(VI32, list(range(LANES)))
    limit = splat_ir(b, b.trunc(count, _I32))
    return b.select(b.icmp_signed("<", lanes, limit), x, splat_ir(b, other))


def _halves(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    for width in (8, 4, 2, 1):
        order = [(i + width) % LANES for i in range(LANES)]
        x = combine(x, b.shuffle_vector(x, x, ir.Constant(VI32, order)))
    return b.extract_element(x, _I32(0))


@routine(FLOAT, VEC)
def total(b: Builder, x: Value) -> Value:
    """Sum of the lanes, always in the same order."""
    return _halves(b, x, b.fadd)


@routine(FLOAT, VEC)
def largest(b: Builder, x: Value) -> Value:
    return _halves(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@routine(FLOAT, VEC)
def first(b: Builder, x: Value) -> Value:
    return b.extract_element(x, _I32(0))


# Minimax fit of 2**f on [-0.5, 0.5] with the constant held at 1, so that exp(0) is exactly 1.
EXP2 = (1.0, 0.69314698, 0.24022242, 0.055507338, 0.0096715145, 0.00132647)
LOG2E = (1.4426950216293335, 1.9259629911e-8)
"""log2(e) as a float32 and what that leaves out."""


@routine(VEC, VEC)
def exp(b: Builder, x: Value) -> Value:
    """e**x to a relative 2e-7; 0 below -87, 1.7e38 above 88, NaN stays NaN."""
    high, low = vector([88.0] * LANES), vector([-87.0] * LANES)
    y = b.select(b.fcmp_ordered("<", x, high), x, high)
    y = b.select(b.fcmp_ordered(">", y, low), y, low)
    log2e, rest = (vector([part] * LANES) for part in LOG2E)
    whole = call_ir(b, "llvm.rint.v16f32", VF32, b.fmul(y, log2e))
    part = fma_ir(b, y, rest, fma_ir(b, y, log2e, b.fneg(whole)))
    value = vector([EXP2[-1]] * LANES)
    for coefficient in EXP2[-2::-1]:
        value = fma_ir(b, value, part, vector([coefficient] * LANES))
    shifted = b.shl(b.fptosi(whole, VI32), ir.Constant(VI32, [23] * LANES))
    value = b.bitcast(b.add(b.bitcast(value, VI32), shifted), VF32)
    value = b.select(b.fcmp_ordered("<", x, low), ZERO, value)
    return b.select(b.fcmp_unordered("uno", x, x), x, value)
