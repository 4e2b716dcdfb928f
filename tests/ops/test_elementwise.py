from __future__ import annotations

import pytest
import torch

from interlock import ops
from interlock.ops import reference
from opcases import CPU, TOLERANCE, error, random

TOKENS = [1, 2, 7, 33]
WIDTHS = [16, 50, 576]


def table(dtype):
    return ops.build(CPU, dtype, {})


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [*TOKENS, 300])
def test_rms_norm(dtype, tokens, width):
    x, w = 3 * random(tokens, width, dtype=dtype), random(width, seed=1, dtype=dtype)
    got = table(dtype).rms_norm(x, w, 1e-5)
    assert got.dtype == dtype
    assert error(got, reference.rms_norm(x.double(), w.double(), 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_add_rms_norm(dtype, tokens, width):
    x, r = random(tokens, width, dtype=dtype), random(tokens, width, seed=1, dtype=dtype)
    w = random(width, seed=2, dtype=dtype)
    before = x.clone(), r.clone()
    got, summed = table(dtype).add_rms_norm(x, r, w, 1e-5)
    assert torch.equal(summed, x + r)
    assert error(got, reference.rms_norm(summed.double(), w.double(), 1e-5)) < TOLERANCE[dtype]
    assert torch.equal(x, before[0])
    assert torch.equal(r, before[1])


def test_rms_norm_of_zeros_and_nan(dtype):
    w = torch.ones(64, dtype=dtype)
    x = torch.zeros(3, 64, dtype=dtype)
    x[1, 5] = float("nan")
    got = table(dtype).rms_norm(x, w, 1e-5)
    assert not got[0].any()
    assert got[1].isnan().all()
    assert not got[2].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [*TOKENS, 300])
def test_silu_mul(dtype, tokens, width):
    x = 4 * random(tokens, 2 * width, dtype=dtype)
    got = table(dtype).silu_mul(x)
    assert got.shape == (tokens, width)
    assert error(got, reference.silu_mul(x.double())) < TOLERANCE[dtype]


def test_silu_mul_at_the_extremes(dtype):
    gate = torch.tensor([[-300.0, -88, -1, 0, 1, 88, 300, float("nan")] * 2], dtype=dtype)
    got = table(dtype).silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    wanted = reference.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1).double())
    assert torch.allclose(got.double(), wanted, rtol=8e-3, atol=1e-20, equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (1, 1, 6)]
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_store(dtype, tokens, heads, groups, dim):
    qkv = random(tokens, (heads + 2 * groups) * dim, dtype=dtype)
    angles = random(90, dim // 2, seed=1)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1)
    positions = torch.arange(tokens) * 2 + 3
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[tokens // 2] = -1
    pools = [torch.zeros(6, 8, groups, dim, dtype=dtype) for _ in range(2)]
    wide = [pool.double() for pool in pools]
    copy = qkv.double()
    rest = (positions, *pools, slots, heads, groups)
    got = table(dtype).rope_store(qkv, cos_sin, *rest)
    wanted = reference.rope_store(copy, cos_sin, positions, *wide, slots, heads, groups)
    assert got.shape == (tokens, heads, dim)
    assert got.data_ptr() == qkv.data_ptr()
    assert error(got, wanted) < TOLERANCE[dtype]
    assert torch.equal(pools[1].double(), wide[1])
    if tokens > 1:
        assert error(pools[0], wide[0]) < TOLERANCE[dtype]
    else:
        assert not pools[0].any()


def test_rows_have_the_same_bits_alone_and_together(dtype):
    t = table(dtype)
    x, w = random(300, 576, dtype=dtype), random(576, seed=1, dtype=dtype)
    norm, silu = t.rms_norm(x, w, 1e-5), t.silu_mul(x)
    for i in (0, 7, 8, 299):
        assert torch.equal(t.rms_norm(x[i : i + 1], w, 1e-5)[0], norm[i])
        assert torch.equal(t.silu_mul(x[i : i + 1])[0], silu[i])


def test_strided_rows(dtype):
    t = table(dtype)
    wide, w = random(5, 100, dtype=dtype), random(64, seed=1, dtype=dtype)
    x = wide[:, 20:84]
    assert torch.equal(t.rms_norm(x, w, 1e-5), t.rms_norm(x.contiguous(), w, 1e-5))
    assert torch.equal(t.silu_mul(x), t.silu_mul(x.contiguous()))


def test_no_rows(dtype):
    t = table(dtype)
    x, w = torch.zeros(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert t.rms_norm(x, w, 1e-5).shape == (0, 64)
    assert t.add_rms_norm(x, x, w, 1e-5)[1].shape == (0, 64)
    assert t.silu_mul(x).shape == (0, 32)
