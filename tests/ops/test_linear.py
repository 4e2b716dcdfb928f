from __future__ import annotations

import pytest
import torch

from interlock.layers.linear import (
    FEW_ROWS,
    Dense,
    FixedRows,
    Linear,
    PackedDense,
    PackedGroups,
    RowKinds,
    split_blocks,
)
from interlock.ops import kernel_problem
from opcases import CPU, FakeWeight, error, random

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33)
# Rounding of a bf16 result; of float32 sums over a few hundred products.
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 3e-6, torch.float64: 1e-12}


def layer(parts, dtype, *, bias=None, methods=lambda **_: None, **options):
    linear = Linear("l", parts[0].numbers.shape[1], [len(p.numbers) for p in parts], methods,
                    dtype=dtype, device=CPU, **options)  # fmt: skip
    linear.load(parts, bias)
    return linear


def wanted(x, parts, bias=None):
    y = x.double() @ torch.cat([p.numbers for p in parts]).double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("any_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("sizes", "inputs"), [((64, 128), 32), ((5, 70), 36), ((1,), 576)])
def test_dense_weights(any_dtype, invariant, sizes, inputs):
    parts = [FakeWeight.plain(random(n, inputs, seed=n).to(any_dtype).float()) for n in sizes]
    bias = random(sum(sizes), seed=5)
    linear = layer(parts, any_dtype, bias=bias, batch_invariant=invariant)
    for rows in (*ROWS, 200):
        x = random(rows, inputs, seed=rows).to(any_dtype)
        got = linear(x)
        assert got.dtype == any_dtype
        bias_error = 2**-9 if any_dtype == torch.bfloat16 else 0
        assert error(got, wanted(x, parts, bias)) < ROUNDING[any_dtype] + bias_error


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("sizes", "inputs"), [((64, 128), 64), ((3, 70), 96), ((576,), 576)])
def test_blocks_are_multiplied_exactly_for_few_rows(dtype, kind, sizes, inputs):
    """Within the rounding of the result alone; the dense copy adds that of each weight."""
    parts = [FakeWeight.quantized(random(n, inputs, seed=n), kind) for n in sizes]
    linear = layer(parts, dtype)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows).to(dtype)
        weights_rounded = dtype == torch.bfloat16 and rows > FEW_ROWS[kind]
        bound = ROUNDING[dtype] + (2**-8 if weights_rounded else 0)
        assert error(linear(x), wanted(x, parts)) < bound, rows


def test_blocks_are_used_where_they_can_be(dtype):
    parts = [FakeWeight.quantized(random(64, 64), "Q4_1")]
    expected = PackedGroups if dtype == torch.bfloat16 else PackedDense
    assert type(layer(parts, dtype).method) is expected
    assert type(layer(parts, dtype, batch_invariant=True).method) is PackedDense


def test_a_mixture_of_formats_is_dense(dtype):
    parts = [FakeWeight.quantized(random(64, 64), kind) for kind in ("Q4_1", "Q8_0")]
    linear = layer(parts, dtype)
    assert type(linear.method) is PackedDense
    x = random(3, 64).to(dtype)
    assert error(linear(x), wanted(x, parts)) < ROUNDING[dtype] + 2**-8


def test_extreme_blocks(dtype):
    """All nibbles and bytes, negative scales, and a Q4_0 scale whose minimum leaves float16."""
    values = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(torch.uint8)
    scale = torch.tensor([[-0.5] * 8], dtype=torch.float16).view(torch.uint8).view(1, 8, 2)
    raw = torch.cat([scale, values.view(1, 8, 32)], dim=-1).flatten(1)
    exact = -0.5 * torch.arange(-128.0, 128.0)[None]
    part = FakeWeight(FakeWeight.quantized(random(1, 256), "Q8_0").info, exact, raw)
    x = random(1, 256).to(dtype)
    assert error(layer([part], dtype)(x), wanted(x, [part])) < ROUNDING[dtype]
    big = torch.tensor([[30000.0]], dtype=torch.float16).view(torch.uint8)
    nibbles = torch.arange(16, dtype=torch.uint8)[None] * 17
    raw = torch.cat([big, nibbles], dim=1)
    exact = 30000.0 * (torch.arange(32) % 16 - 8.0)[None]
    part = FakeWeight(FakeWeight.quantized(random(1, 32), "Q4_0").info, exact, raw)
    x = random(1, 32).to(dtype)
    assert error(layer([part], dtype)(x), wanted(x, [part])) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_split_blocks_inverts_ggml(kind):
    weight = FakeWeight.quantized(random(3, 96), kind)
    planes, scale, minimum = split_blocks(weight.raw, kind)
    q = planes[0].double()
    if kind == "Q8_0":
        q = q + 16 * (planes[1].double() - 8)
    spread = [t.double().repeat_interleave(32, dim=1) for t in (scale, minimum)]
    assert torch.equal(q * spread[0] + spread[1], weight.numbers.double())


@pytest.mark.parametrize("any_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("inputs", [576, 100])
def test_batch_invariant_rows(any_dtype, inputs):
    """A row's bits don't depend on how many rows there are, or on where it is among them."""
    linear = layer([FakeWeight.plain(random(130, inputs))], any_dtype, batch_invariant=True)
    x = random(300, inputs, seed=1).to(any_dtype)
    whole = linear(x)
    for rows in (*ROWS, 100, 193):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x[order]), whole[order])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_the_kernel_for_blocks_is_batch_invariant_too(kind):
    dtype = torch.bfloat16
    if kernel_problem(dtype) is not None:
        pytest.skip("the CPU has no bf16 kernels")
    part = FakeWeight.quantized(random(130, 64), kind)
    method = layer([part], dtype).method
    method._few = 1000
    x = random(300, 64, seed=1).to(dtype)
    whole = method.apply(x)
    assert error(whole, wanted(x, [part])) < ROUNDING[dtype]
    assert error(whole[192:], wanted(x[192:], [part])) < ROUNDING[dtype]
    for rows in (*ROWS, 193):
        assert torch.equal(method.apply(x[:rows]), whole[:rows])


def test_nan_stays_in_its_row(dtype):
    linear = layer([FakeWeight.plain(random(70, 64))], dtype)
    x = random(9, 64).to(dtype)
    good = linear(x)
    x[4, 7] = float("nan")
    got = linear(x)
    assert got[4].isnan().all()
    assert torch.equal(got[:4], good[:4])
    assert torch.equal(got[5:], good[5:])


def test_strided_input_and_no_rows(dtype):
    linear = layer([FakeWeight.plain(random(70, 64))], dtype)
    x = random(9, 100).to(dtype)[:, 10:74]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert linear(x[:0]).shape == (0, 70)


def test_other_devices_and_dtypes_use_torch():
    meta = torch.device("meta")
    kinds = [(torch.float64, CPU, False, Dense), (torch.float64, CPU, True, FixedRows),
             (torch.bfloat16, meta, False, Dense),
             (torch.bfloat16, meta, True, FixedRows)]  # fmt: skip
    for kind, device, invariant, expected in kinds:
        linear = Linear("l", 8, [4], lambda **_: None, dtype=kind, device=device,
                        batch_invariant=invariant)  # fmt: skip
        assert type(linear._choose("F32")) is expected


def test_without_kernels_everything_is_torch(monkeypatch):
    monkeypatch.setattr("interlock.layers.linear.kernel_problem", lambda _: "no numba")
    parts = [FakeWeight.quantized(random(64, 64), "Q4_1")]
    linear = layer(parts, torch.bfloat16)
    assert type(linear.method) is Dense
    x = random(3, 64).to(torch.bfloat16)
    assert error(linear(x), wanted(x, parts)) < 2**-7


def test_a_plugins_method_is_asked_once_with_the_layer():
    asked = []

    class Twice(Dense):
        def apply(self, x):
            return 2 * super().apply(x)

    def methods(**described):
        asked.append(described)
        return Twice(described["dtype"], described["device"])

    parts = [FakeWeight.plain(random(4, 8)), FakeWeight.plain(random(2, 8))]
    linear = layer(parts, torch.float32, methods=methods)
    assert asked == [{"name": "l", "in_features": 8, "out_features": 6, "weight_format": "F32",
                      "dtype": torch.float32, "device": CPU}]  # fmt: skip
    x = random(3, 8)
    assert error(linear(x), 2 * wanted(x, parts)) < 1e-6


@pytest.mark.skipif(kernel_problem(torch.bfloat16) is not None, reason="no kernels here")
@pytest.mark.parametrize("leading", [0, 1, 9, 30, 40])
def test_rows_of_blocks_go_by_their_kind_and_not_by_their_number(leading):
    kinds = RowKinds()
    linear = layer([FakeWeight.quantized(random(130, 64), "Q4_1")], torch.bfloat16, kinds=kinds)
    x = random(30, 64, dtype=torch.bfloat16)
    kinds.leading = 10**6
    exact = torch.cat([linear(row[None]) for row in x])
    kinds.leading = 0
    rounded = torch.cat([linear(row[None]) for row in x])
    assert not torch.equal(exact, rounded)
    kinds.leading = leading
    assert torch.equal(linear(x), torch.cat([exact[:leading], rounded[leading:]]))
