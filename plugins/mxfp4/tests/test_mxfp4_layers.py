"""Linear layers and experts that run from packed weights, against their dequantized values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import ConfigError
from interlock.extension import ExpertLayer, ExpertMethod, LinearMethod, UnfinalizedExperts, check
from interlock.layers.linear import RowKinds
from interlock.ops import kernel_problem
from interlock.ops.experts import finalize_experts, latent_tail, run_experts
from interlock.ops.reference import rms_norm, wide
from interlock.parallel.group import SINGLE
from interlock.weights.packed_fp4 import decode, pack
from interlock.weights.source import TensorInfo, WeightTensor
from interlock_mxfp4 import Mxfp4
from interlock_mxfp4.experts import defers, sort_by_expert
from interlock_mxfp4.layers import Layers
from interlock_mxfp4.settings import Mxfp4Settings

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Sums of products of some hundred terms; bf16 and fp16 round the result once more.
BOUND = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


class Stored(WeightTensor):
    """A weight [N, K], stored packed or plain."""

    def __init__(self, weight: torch.Tensor, packed: bool = True, name: str = "w.weight") -> None:
        self._packed = pack(weight) if packed else None
        self.values = decode(*self._packed, torch.float64) if packed else weight.double()
        kind = "MXFP4" if packed else "BF16"
        super().__init__(TensorInfo(name, tuple(weight.shape), kind, Path("f"), 0))

    def dense(self, dtype):
        return self.values.to(dtype)

    def packed(self):
        return self._packed


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(**options) -> Layers:
    return Layers(Mxfp4Settings(**options))


def linear(parts, dtype, bias=None, **options):
    chosen = layers(**options)
    first = parts[0].info
    method = chosen.linear(first.name, first.shape[1], first.format, dtype, CPU)
    check(method, LinearMethod, "mxfp4")
    method.create_weights(first.shape[1], sum(p.info.shape[0] for p in parts))
    method.load(parts, bias)
    return method, chosen


def error(found, x, parts, bias=None):
    """The largest difference from the exact product, in units of the sum of absolute terms."""
    weight = torch.cat([p.values for p in parts])
    wanted, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    return float(((found.double() - wanted).abs() / size.clamp_min(1e-30)).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "inputs"), [((64,), 32), ((70, 5), 96), ((1,), 576), ((200,), 64)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_layers(dtype, sizes, inputs, with_bias):
    parts = [Stored(draw(n, inputs, seed=n)) for n in sizes]
    bias = draw(sum(sizes), seed=9).to(torch.bfloat16).float() if with_bias else None
    method, _ = linear(parts, dtype, bias)
    for rows in (0, 1, 2, 3, 5, 6, 7, 13, 47, 48, 60, 200):
        x = draw(rows, inputs, seed=rows).to(dtype)
        found = method.apply(x)
        assert found.shape == (rows, sum(sizes))
        assert found.dtype == dtype
        if rows:
            assert error(found, x, parts, bias) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    """However many neighbours it has: looking elements up once, or for every few rows."""
    if kernel_problem(dtype) is not None:
        pytest.skip("this CPU has no packed kernels")
    parts = [Stored(draw(130, 96))]
    method, chosen = linear(parts, dtype)
    assert chosen.paths == {"cpu": 1}
    x = draw(400, 96, seed=1).to(dtype)
    whole = method.apply(x)
    for rows in (1, 2, 5, 6, 7, 47, 48, 49, 192, 193):
        assert torch.equal(method.apply(x[:rows]), whole[:rows])
        assert torch.equal(method.apply(x[-rows:]), whole[-rows:])
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    assert torch.equal(method.apply(x[order]), whole[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_scales_multiply(dtype):
    """MXF-06: the smallest, which are subnormal or lead there, as well as the largest."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)[:, :16].contiguous()
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(1)[:, None]
    codes = codes[:255]

    class Given(Stored):
        def __init__(self):
            super().__init__(torch.zeros(255, 32))
            self._packed = (codes, scale)
            self.values = decode(codes, scale, torch.float64)

    method, _ = linear([Given()], dtype)
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 3] = 0.5
    wanted = (0.5 * decode(codes, scale, torch.float64)[:, 3]).to(dtype)
    assert torch.equal(method.apply(x)[0], wanted)


def test_nan_stays_in_its_row():
    method, _ = linear([Stored(draw(70, 64))], torch.bfloat16)
    x = draw(60, 64).to(torch.bfloat16)
    good = method.apply(x)
    x[31, 5] = float("nan")
    found = method.apply(x)
    assert found[31].isnan().all()
    assert torch.equal(found[:31], good[:31])
    assert torch.equal(found[32:], good[32:])


def test_strided_rows():
    method, _ = linear([Stored(draw(70, 64))], torch.bfloat16)
    x = draw(9, 100).to(torch.bfloat16)[:, 10:74]
    assert torch.equal(method.apply(x), method.apply(x.contiguous()))


@pytest.mark.parametrize(
    ("scope", "kind", "taken"),
    [
        ("stored", "MXFP4", True), ("stored", "BF16", False), ("linear", "BF16", True),
        ("all", "BF16", True), ("experts", "BF16", False), ("experts", "MXFP4", True),
    ],
)  # fmt: skip
def test_which_linear_layers_are_taken(scope, kind, taken):
    chosen = layers(scope=scope)
    method = chosen.linear("model.layers.0.mlp.down_proj", 64, kind, torch.bfloat16, CPU)
    assert (method is not None) == taken
    assert chosen.counters()["layers_now"] == taken


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.block_sparse_moe.gate", "x.b_proj"])
def test_what_is_ignored_is_not_quantized_but_stays_packed_if_it_is_stored_so(name):
    assert layers(scope="all").linear(name, 64, "BF16", torch.bfloat16, CPU) is None
    assert layers(scope="all").linear(name, 64, "MXFP4", torch.bfloat16, CPU) is not None


def test_inputs_that_fill_no_groups_are_left_and_said(capsys):
    assert layers(scope="all").linear("l", 40, "BF16", torch.bfloat16, CPU) is None
    assert "l: 40 inputs are no multiple of 32; not quantized" in capsys.readouterr().err


def test_quantizing_reports_the_error_of_every_weight(capsys):
    weight = draw(8, 64)
    linear([Stored(weight, packed=False)], torch.float32, scope="linear")
    line = capsys.readouterr().err.splitlines()[-1]
    values = decode(*pack(weight), torch.float32)
    relative = float((weight - values).norm() / weight.norm())
    assert line == (
        f"mxfp4: w.weight: 1 matrix quantized from BF16, relative error {100 * relative:.2f} %, "
        f"largest {float((weight - values).abs().max()):.4g}"
    )


def test_the_chosen_path_is_said_and_counted(capsys):
    """MXF-05."""
    _, chosen = linear([Stored(draw(8, 64))], torch.float64)
    assert chosen.counters()["layers_torch_now"] == 1
    said = capsys.readouterr().err
    assert "mxfp4: runs on torch: " in said
    assert "float64" in said


# -- experts ---------------------------------------------------------------------------------------


def layer(**changes) -> ExpertLayer:
    given = {
        "name": "model.layers.1.block_sparse_moe.experts", "num_experts": 5, "top": 3, "size": 64,
        "inner": 96, "activation": ("situ", 4.0, 25.0), "weight_format": "MXFP4",
        "dtype": torch.float64, "device": CPU, "kinds": RowKinds(), "batch_invariant": None,
        "unfinalized_capacity": 10**9,
    }  # fmt: skip
    return ExpertLayer(**{**given, **changes})


class Weights:
    """Matrices of all experts, and what they are as dense tensors."""

    def __init__(self, shape: ExpertLayer, packed: bool = True) -> None:
        sizes = {"w1": (shape.inner, shape.size), "w3": (shape.inner, shape.size),
                 "w2": (shape.size, shape.inner)}  # fmt: skip
        self._given = {
            (expert, part): Stored(draw(*size, seed=10 * expert + number) / 8, packed, part)
            for expert in range(shape.num_experts)
            for number, (part, size) in enumerate(sizes.items())
        }
        self._count = shape.num_experts

    def __call__(self, expert: int, part: str) -> Stored:
        return self._given[expert, part]

    def dense(self, dtype):
        def of(expert, part):
            return self._given[expert, part].values

        w13 = torch.stack([torch.cat([of(e, "w1"), of(e, "w3")]) for e in range(self._count)])
        w2 = torch.stack([of(e, "w2") for e in range(self._count)])
        return w13.to(dtype), w2.to(dtype)


def experts(shape: ExpertLayer, weights: Weights, **options):
    chosen = layers(**options)
    method = check(chosen.experts(shape), ExpertMethod, "mxfp4")
    method.load(weights)
    return method, chosen


def routed(tokens: int, shape: ExpertLayer, seed: int = 0, dtype=torch.float64):
    scores = draw(tokens, shape.num_experts, seed=seed)
    ids = scores.topk(shape.top).indices.sort(-1).values
    return draw(tokens, shape.top, seed=seed + 1).abs().to(wide(dtype)), ids


def finished(out):
    if isinstance(out, UnfinalizedExperts):
        return finalize_experts(out.rows, out.weights, out.row_map)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [("situ", 4.0, 25.0), ("situ", 4.0, None), ("silu",)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 100])
def test_experts_against_dense_ones(dtype, activation, tokens):
    shape = layer(dtype=dtype, activation=activation)
    weights = Weights(shape)
    method, _ = experts(shape, weights)
    x = draw(tokens, shape.size, seed=3).to(dtype)
    w, ids = routed(tokens, shape, dtype=dtype)
    found = finished(method.apply(x, w, ids))
    assert found.shape == (tokens, shape.size)
    assert found.dtype == wide(dtype)
    if tokens:
        beta, linear_beta = (*activation[1:], None, None)[:2]
        exact = run_experts(
            x.double(), *weights.dense(torch.float64), w.double(), ids, beta, linear_beta
        )
        assert float((found - exact).abs().max() / exact.abs().max()) < 4 * BOUND[dtype]


def test_padding_and_slots_of_other_ranks_have_no_row():
    shape = layer()
    weights = Weights(shape)
    method, _ = experts(shape, weights)
    x, (w, ids) = draw(9, 64).double(), routed(9, shape)
    ids[2, 1] = ids[5] = -1
    x[5] = float("nan")
    out = method.apply(x, w, ids)
    assert (out.row_map[5] == -1).all()
    found = finished(out)
    assert not found[5].any()
    w[2, 1] = 0
    kept = ids.clamp_min(0)
    x[5] = 0
    assert torch.allclose(
        found[[0, 1, 2, 3, 4, 6, 7, 8]],
        run_experts(x, *weights.dense(torch.float64), w, kept, 4.0, 25.0)[[0, 1, 2, 3, 4, 6, 7, 8]],
        rtol=1e-12,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(1, 6), st.integers(0, 10**6))
def test_slots_are_grouped_by_expert(tokens, top, seed):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 4, (tokens, top), generator=random)
    where, counts, row_map = sort_by_expert(ids, 4)
    assert counts == [int((ids == e).sum()) for e in range(4)]
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    for t in range(tokens):
        for k in range(top):
            row = int(row_map[t, k])
            assert (row == -1) == (int(ids[t, k]) == -1)
            if row >= 0:
                assert (int(where[row]), int(owner[row])) == (t, int(ids[t, k]))
    assert sorted(row_map[row_map >= 0].tolist()) == list(range(sum(counts)))


@pytest.mark.parametrize("inner", [16, 176])
def test_an_inner_size_that_fills_no_groups_is_padded(inner):
    """MXF-05: the fast path stays; zeros in, zeros out."""
    shape = layer(inner=inner, weight_format="BF16", dtype=torch.float32)
    weights = Weights(shape, packed=False)
    method, _ = experts(shape, weights, scope="experts")
    x, (w, ids) = draw(6, 64).float(), routed(6, shape, dtype=torch.float32)
    quantized = [
        torch.stack([torch.cat([padded(weights(e, p)) for p in ("w1", "w3")]) for e in range(5)]),
        torch.stack([padded(weights(e, "w2")) for e in range(5)]),
    ]
    exact = run_experts(x.double(), *quantized, w.double(), ids, 4.0, 25.0)
    found = finished(method.apply(x, w, ids))
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5


def padded(tensor: Stored) -> torch.Tensor:
    weight = tensor.values.float()
    columns = weight.shape[1]
    whole = torch.nn.functional.pad(weight, (0, -columns % 32))
    return decode(*pack(whole), torch.float64)[:, :columns]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_deferred_and_eager_are_the_same_numbers(dtype):
    """And the tail's norm is the one that follows an eager sum."""
    shape = layer(dtype=dtype)
    weights = Weights(shape)
    x, (w, ids) = draw(33, 64).to(dtype), routed(33, shape, dtype=dtype)
    deferred, a = experts(shape, weights, finalize="deferred")
    eager, b = experts(shape, weights, finalize="eager")
    left, done = deferred.apply(x, w, ids), eager.apply(x, w, ids)
    assert isinstance(left, UnfinalizedExperts)
    assert isinstance(done, torch.Tensor)
    assert torch.equal(finished(left), done)
    norm = (1 + 0.1 * draw(64, seed=8)).to(dtype)
    assert torch.equal(
        latent_tail(left.rows, left.weights, left.row_map, norm, 1e-5, SINGLE),
        rms_norm(done.to(dtype), norm, 1e-5),
    )
    assert (a.counts.deferred, a.counts.eager) == (1, 0)
    assert (b.counts.deferred, b.counts.eager) == (0, 1)


def test_only_what_the_consumer_takes_is_left_unfinalized(capsys):
    shape = layer(unfinalized_capacity=8)
    weights = Weights(shape)
    method, chosen = experts(shape, weights)
    for tokens, kind in ((8, UnfinalizedExperts), (9, torch.Tensor)):
        w, ids = routed(tokens, shape)
        assert isinstance(method.apply(draw(tokens, 64).double(), w, ids), kind)
    assert "deferred to the consumer's tail up to 8 tokens" in capsys.readouterr().err
    counters = chosen.counters()
    assert counters["finalize_deferred_total"] == counters["finalize_eager_total"] == 1
    never = layer(unfinalized_capacity=0)
    assert not defers(Mxfp4Settings(), never, 1)
    experts(never, weights)
    assert "eager: the layer's consumer takes finished results only" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_every_company(dtype):
    if kernel_problem(dtype) is not None:
        pytest.skip("this CPU has no packed kernels")
    shape = layer(dtype=dtype)
    method, _ = experts(shape, Weights(shape))
    x, (w, ids) = draw(300, 64).to(dtype), routed(300, shape, dtype=dtype)
    whole = finished(method.apply(x, w, ids))
    for rows in (1, 2, 7, 64):
        assert torch.equal(finished(method.apply(x[:rows], w[:rows], ids[:rows])), whole[:rows])


def test_one_expert_may_take_all_tokens():
    shape = layer(dtype=torch.float32, top=1)
    weights = Weights(shape)
    method, _ = experts(shape, weights)
    x, ids = draw(250, 64), torch.full((250, 1), 3)
    w = torch.ones(250, 1)
    exact = run_experts(x.double(), *weights.dense(torch.float64), w.double(), ids, 4.0, 25.0)
    found = finished(method.apply(x, w, ids))
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5


def test_tokens_whose_size_fills_no_groups_are_left_to_the_core(capsys):
    assert layers(scope="all").experts(layer(size=40, weight_format="BF16")) is None
    assert "40 numbers are no multiple of 32; not quantized" in capsys.readouterr().err


def test_a_rank_without_a_part_cannot_fuse_its_tail():
    """It would wait for nobody while the others wait for it."""
    assert layers().experts(layer(inner=0)) is not None
    with pytest.raises(ConfigError, match=r"mxfp4.tail: fused needs a part of every expert"):
        layers(tail="fused").experts(layer(inner=0))


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="'ignore': '\\(' is no regular expression"):
        Mxfp4Settings(ignore=("(",))


def test_the_plugin_declares_what_it_is():
    plugin = Mxfp4()
    assert plugin.api_version == 1
    assert plugin.interlock_settings() is Mxfp4Settings
