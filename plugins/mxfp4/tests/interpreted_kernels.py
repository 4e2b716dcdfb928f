"""The Triton kernels in Triton's interpreter, against their PyTorch references.

Run by `test_mxfp4_interpreted.py` in a process of its own: whether kernels are interpreted is
decided when Triton is imported. Outputs are poisoned with NaN first, and so is what no slot names.
"""

from __future__ import annotations

import attrs
import pytest
import torch

import triton_interpreter
from interlock.ops.experts import run_experts
from interlock.weights.packed_fp4 import decode, pack
from interlock_mxfp4.kernels import (
    activation,
    experts,
    experts_mx,
    reduce_tail,
    reference,
    routing,
    tail,
)
from interlock_mxfp4.tiles import Tiles

triton_interpreter.install()
NAN = float("nan")
SMALL = Tiles(tokens=16, outputs=64, inputs=64, warps=4, stages=2)
WIDE = Tiles(tokens=32, outputs=128, inputs=128, warps=4, stages=2)
MX = Tiles(tokens=16, outputs=128, inputs=128, warps=4, stages=2)
SITU, PLAIN, SWIGLU = (4.0, 25.0), (4.0, None), (None, None)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(count: int, rows: int, columns: int, seed: int = 0) -> reference.Packed:
    pairs = [pack(draw(rows, columns, seed=seed + e) / columns**0.5) for e in range(count)]
    return reference.Packed(*(torch.stack(each) for each in zip(*pairs, strict=True)))


def chosen(tokens: int, top: int, count: int, seed: int = 0) -> torch.Tensor:
    """Ids [T, top], some slots of nobody."""
    ids = draw(tokens, count, seed=seed).topk(top).indices if tokens else torch.empty(0, top).long()
    ids[draw(tokens, top, seed=seed + 1) > 1.2] = -1
    return ids


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype)


CASES = {
    "mixed": lambda: chosen(17, 3, 5),
    "one token": lambda: torch.tensor([[4, 0, 2]]),
    "nobody": lambda: torch.full((3, 3), -1),
    "one expert takes all": lambda: torch.full((21, 1), 3),
    "experts without tokens": lambda: torch.tensor([[1, 3], [3, 1], [1, 3]]),
    "padding rows": lambda: torch.cat([chosen(5, 3, 5), torch.full((4, 3), -1)]),
    "more than a chunk": lambda: chosen(150, 3, 5, seed=9),
}


@pytest.fixture(params=CASES)
def ids(request) -> torch.Tensor:
    return CASES[request.param]()


@pytest.mark.parametrize("block", [16, 32])
def test_routing(ids, block):
    found, wanted = (f(ids, 5, block) for f in (routing.sort_tokens, reference.sort_tokens))
    for field in attrs.fields(reference.Routing):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name


def test_routing_of_no_token():
    found = routing.sort_tokens(torch.empty(0, 3, dtype=torch.int64), 5, 16)
    assert found.starts.tolist() == [0] * 6
    assert found.row_map.shape == (0, 3)


def test_routing_with_many_experts_and_pairs():
    """More chunks than one, each of several steps."""
    ids = torch.randint(-1, 896, (700, 16), generator=torch.Generator().manual_seed(1))
    found, wanted = (f(ids, 896, 16) for f in (routing.sort_tokens, reference.sort_tokens))
    assert torch.equal(found.row_map, wanted.row_map)
    assert torch.equal(found.row_token, wanted.row_token)


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    scale = wanted.double().abs().max().clamp_min(1e-30)
    assert float((found.double() - wanted.double()).abs().max() / scale) < bound


def counted(route: reference.Routing) -> slice:
    """Rows up to the last expert's end."""
    return slice(0, int(route.starts[-1]))


# Rounding of products to the output's dtype, and of sums in another order.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("size", "inner"), [(96, 64), (64, 160), (160, 32)])
@pytest.mark.parametrize("activation_of", [SITU, PLAIN, SWIGLU], ids=["situ", "plain up", "swiglu"])
def test_both_products(dtype, size, inner, activation_of):
    """Sizes that fill no tile, in every dtype; padding rows inside tiles are zero."""
    ids = chosen(17, 3, 5)
    w13, w2 = packed(5, 2 * inner, size), packed(5, size, inner, seed=50)
    x = draw(17, size, seed=2).to(dtype)
    route = routing.sort_tokens(ids, 5, SMALL.tokens)
    rows = len(route.row_token)
    hidden = experts.expert_gate_up(
        x, w13, route, SMALL, *activation_of, out=poisoned(rows, inner, dtype=dtype)
    )
    wanted = reference.expert_gate_up(x, w13, route, *activation_of)
    use = counted(route)
    close(hidden[use], wanted[use], BOUNDS[dtype])
    assert not hidden[use][route.row_token[use] < 0].any()
    out = experts.expert_down(hidden, w2, route, SMALL, out=poisoned(rows, size, dtype=dtype))
    wanted = reference.expert_down(hidden.nan_to_num(), w2, route)
    close(out[use], wanted[use], BOUNDS[dtype])
    assert out[use.stop :].isnan().all()


def test_tiles_do_not_change_the_result(ids):
    w13, x = packed(5, 128, 96), draw(len(ids), 96, seed=2)
    results = []
    for tiles in (SMALL, WIDE):
        route = routing.sort_tokens(ids, 5, tiles.tokens)
        inner = experts.expert_gate_up(x, w13, route, tiles, *SITU)
        slots = route.row_map[route.row_map >= 0].long()
        results.append(inner[slots])
    close(*results, 2e-6) if len(results[0]) else None


def test_the_whole_path_is_the_core_s(ids):
    """Sort, both products, and the sum over slots: `run_experts` of the dequantized weights."""
    size, inner = 96, 64
    w13, w2 = packed(5, 2 * inner, size), packed(5, size, inner, seed=50)
    x = draw(len(ids), size, seed=2)
    weights = draw(*ids.shape, seed=3).abs()
    route = routing.sort_tokens(ids, 5, SMALL.tokens)
    rows = poisoned(len(route.row_token), size)
    hidden = experts.expert_gate_up(x, w13, route, SMALL, *SITU, out=poisoned(len(rows), inner))
    rows = experts.expert_down(hidden, w2, route, SMALL, out=rows)
    out = tail.finalize_experts(rows, weights, route.row_map, out=poisoned(len(ids), size))
    dense = [torch.stack([p.dense(e, torch.float64) for e in range(5)]) for p in (w13, w2)]
    kept = weights.where(ids >= 0, 0.0).double()
    exact = run_experts(x.double(), *dense, kept, ids.clamp_min(0), *SITU)
    close(out, exact, 3e-6) if (ids >= 0).any() else None
    assert not out[(ids < 0).all(1)].any()


# -- MXFP8 activations -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (17, 160), (9, 1024)])
def test_quantizing_activations(dtype, shape):
    x = draw(*shape) * torch.exp2(draw(*shape, seed=1) * 6)
    x[0, :32] = 0
    x = x.clamp(-6e4, 6e4).to(dtype)
    out = torch.full(shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((shape[0], shape[1] // 32), 7, dtype=torch.uint8)
    found = activation.quantize_mxfp8(x, out=(out, scales))
    wanted = reference.quantize_mxfp8(x)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1])
    values = reference.dequantize_mxfp8(*found, torch.float64)
    step = torch.exp2(found[1].double() - 127 + 8 - 3).repeat_interleave(32, 1)
    # Below the largest value everything is within half a step of the largest binade; above it
    # saturates, by at most the part of the binade that E4M3 lacks.
    assert ((x.double() - values).abs() <= step * 2).all()


def test_quantizing_extremes():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0] = 2.0**-149, 3.4e38
    x[2, 3], x[3, 4] = NAN, float("inf")
    found, wanted = activation.quantize_mxfp8(x), reference.quantize_mxfp8(x)
    assert found[1].flatten().tolist() == wanted[1].flatten().tolist() == [0, 246, 255, 255]
    assert torch.equal(found[0][:2].view(torch.uint8), wanted[0][:2].view(torch.uint8))
    for row in (2, 3):
        assert reference.dequantize_mxfp8(*found, torch.float32)[row].isnan().all()


@pytest.mark.parametrize(("size", "inner"), [(96, 64), (160, 96), (256, 160)])
@pytest.mark.parametrize("activation_of", [SITU, SWIGLU], ids=["situ", "swiglu"])
def test_both_products_of_mxfp8(size, inner, activation_of):
    ids = chosen(17, 3, 5)
    w13, w2 = packed(5, 2 * inner, size), packed(5, size, inner, seed=50)
    x = reference.quantize_mxfp8(draw(17, size, seed=2))
    route = routing.sort_tokens(ids, 5, MX.tokens)
    rows = len(route.row_token)
    out = torch.full((rows, inner), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    outs = torch.full((rows, inner // 32), 255, dtype=torch.uint8)
    hidden = experts_mx.expert_gate_up_mx(x, w13, route, MX, *activation_of, out=(out, outs))
    wanted = reference.expert_gate_up_mx(x, w13, route, *activation_of)
    use = counted(route)
    found, exact = (
        reference.dequantize_mxfp8(each[0][use], each[1][use], torch.float32)
        for each in (hidden, wanted)
    )
    # The same numbers up to a tie of E4M3's rounding, or of a scale's, in another order of sums.
    assert float(((found - exact).abs() > 1e-6 * exact.abs().max()).float().mean()) < 0.01
    close(found, exact, 2**-4)
    rows_out = experts_mx.expert_down_mx(
        hidden, w2, route, MX, torch.float32, out=poisoned(rows, size)
    )
    inner_values = tuple(each[use] for each in hidden)
    trimmed = attrs.evolve(route, row_token=route.row_token[use])
    close(rows_out[use], reference.expert_down_mx(inner_values, w2, trimmed, torch.float32), 3e-6)
    assert rows_out[use.stop :].isnan().all()


# -- the tail --------------------------------------------------------------------------------------


def left(dtype: torch.dtype, size: int, seed: int = 0):
    """Rows as experts leave them, NaN wherever no slot points, and a token without any slot."""
    row_map = (
        torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:33].view(11, 3).int()
    )
    row_map[draw(11, 3, seed=seed) > 1] = -1
    row_map[7] = -1
    rows = poisoned(40, size, dtype=dtype)
    used = row_map[row_map >= 0].long()
    rows[used] = draw(len(used), size, seed=seed + 1).to(dtype)
    weights = draw(11, 3, seed=seed + 2).abs()
    weights[row_map < 0] = NAN
    return rows, weights, row_map


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [32, 96, 1000])
def test_finalizing_is_exact(dtype, size):
    given = left(dtype, size)
    found = tail.finalize_experts(*given, out=poisoned(11, size))
    assert torch.equal(found, reference.finalize_experts(*given))
    assert not found[7].any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [32, 96, 1000])
def test_the_norm_follows_the_rounded_sum(dtype, size):
    given = left(dtype, size)
    norm = (1 + 0.1 * draw(size, seed=5)).to(dtype)
    found = tail.finalize_norm(*given, norm, 1e-5, out=poisoned(11, size, dtype=dtype))
    close(found, reference.finalize_norm(*given, norm, 1e-5), BOUNDS[dtype])
    assert not found[7].any()
    # What the eager way gives: the sum by a kernel of its own, then a norm of the same shape.
    alone = tail.finalize_experts(*given).to(dtype)
    identity = torch.arange(11, dtype=torch.int32)[:, None]
    eager = tail.finalize_norm(alone, torch.ones(11, 1), identity, norm, 1e-5)
    assert torch.equal(found, eager)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("tokens", "size", "outputs"), [(1, 96, 70), (17, 64, 200), (40, 160, 64)])
def test_the_up_projection_adds_what_is_shared(dtype, tokens, size, outputs):
    x, weight = draw(tokens, size).to(dtype), draw(outputs, size, seed=1).to(dtype)
    addend = draw(tokens, outputs, seed=2).to(dtype)
    found = tail.linear_add(x, weight, addend, WIDE, out=poisoned(tokens, outputs, dtype=dtype))
    exact = x.double() @ weight.double().T + addend.double()
    close(found, exact, BOUNDS[dtype])


def test_transposed_inputs_are_the_same_numbers():
    from interlock_mxfp4.gpu import packed_linear

    weight, x = packed(1, 70, 96), draw(96, 17).T
    assert torch.equal(packed_linear(x, weight, None), packed_linear(x.contiguous(), weight, None))
    rows, weights, row_map = left(torch.float32, 96)
    wanted = tail.finalize_experts(rows, weights, row_map)
    turned = [each.T.contiguous().T for each in (rows, weights, row_map)]
    assert torch.equal(tail.finalize_experts(*turned), wanted)
    found = activation.quantize_mxfp8(x)
    for a, b in zip(found, activation.quantize_mxfp8(x.contiguous()), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    route = routing.sort_tokens(chosen(17, 3, 5), 5, SMALL.tokens)
    inner = [
        experts.expert_gate_up(each, packed(5, 128, 96), route, SMALL, *SITU)[counted(route)]
        for each in (x, x.contiguous())
    ]
    assert torch.equal(*inner)


def test_the_up_projection_takes_any_strides_of_what_is_shared():
    x, weight, addend = draw(17, 64), draw(200, 64, seed=1), draw(200, 17, seed=2).T
    exact = x.double() @ weight.double().T + addend.double()
    close(tail.linear_add(x, weight, addend, WIDE), exact, BOUNDS[torch.float32])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("ranks", "size"), [(1, 32), (2, 96), (8, 100)])
def test_the_sum_over_ranks_is_everybody_s(dtype, ranks, size):
    """Each rank publishes, then each adds: two calls, so that both slots are used, and a third."""
    parts = torch.full((ranks, 2, reduce_tail.CAPACITY, size), NAN)
    told = torch.zeros(ranks, 2, ranks, reduce_tail.CAPACITY, dtype=torch.int32)
    addresses = [torch.tensor([each.data_ptr() for each in memory]) for memory in (parts, told)]
    norm = (1 + 0.1 * draw(size, seed=5)).to(dtype)
    for call in (1, 2, 3):
        given = [left(dtype, size, seed=10 * call + rank) for rank in range(ranks)]
        outs = [poisoned(11, size, dtype=dtype) for _ in range(ranks)]
        for part in (reduce_tail.PUBLISH, reduce_tail.REDUCE):
            for rank in range(ranks):
                reduce_tail.reduce_tail(
                    *given[rank], norm, 1e-5, *addresses, rank, call, out=outs[rank], part=part
                )
        close(outs[0], reference.reduce_tail(given, norm, 1e-5), BOUNDS[dtype])
        for out in outs[1:]:
            assert torch.equal(out, outs[0])
        assert (told[:, call % 2, :, :11] == call).all()


def test_more_tokens_than_can_wait_together_are_refused():
    rows, weights, row_map = torch.zeros(1, 32), torch.zeros(200, 1), torch.zeros(200, 1).int()
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="200 tokens; all programs of a launch wait together"):
        reduce_tail.reduce_tail(
            rows, weights, row_map, torch.ones(32), 1e-5, nothing, nothing, 0, 1
        )


# -- decoding --------------------------------------------------------------------------------------


def test_every_code_and_scale_is_decoded_exactly():
    """Through the second product: one-hot tokens read single weights."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)[:, :16].repeat(1, 1)
    codes = codes + (torch.arange(64, dtype=torch.uint8) * 4)[:, None]
    for first in (0, 64, 128, 183):
        scale = torch.arange(first, first + 64, dtype=torch.uint8)[:, None]
        weights = reference.Packed(codes[None], scale[None])
        route = reference.sort_tokens(torch.zeros(32, 1, dtype=torch.int64), 1, 32)
        tiles = attrs.evolve(SMALL, tokens=32)
        found = experts.expert_down(torch.eye(32), weights, route, tiles)
        wanted = decode(codes, scale, torch.float32).T
        finite = wanted.isfinite()
        assert torch.equal(found[finite], wanted[finite])


# -- put together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_backend_s_rows_are_the_cpu_s(activations, tokens):
    """The GPU's backend, interpreted, against the backend for any device."""
    from interlock.extension import ExpertLayer
    from interlock.layers.linear import RowKinds
    from interlock_mxfp4.experts import TorchExperts
    from interlock_mxfp4.gpu import TritonExperts

    layer = ExpertLayer(
        name="l", num_experts=5, top=3, size=64, inner=96, activation=("situ", 4.0, 25.0),
        weight_format="MXFP4", dtype=torch.float32, device=torch.device("cpu"),
        kinds=RowKinds(), batch_invariant=None, unfinalized_capacity=0,
    )  # fmt: skip
    w13, w2 = packed(5, 192, 64), packed(5, 64, 96, seed=50)
    x, ids = draw(tokens, 64), chosen(tokens, 3, 5)
    weights = draw(tokens, 3, seed=4).abs()
    outs = []
    for kind in (TritonExperts, TorchExperts):
        backend = kind(layer, activations)
        for expert in range(5):
            pairs = [(p.codes[expert], p.scales[expert]) for p in (w13, w2)]
            backend.put(expert, *pairs)
        rows, row_map = backend.run(x, ids)
        outs.append(backend.finalize(rows, weights, row_map))
    assert outs[0].shape == (tokens, 64)
    if tokens:
        # A tie of E4M3's rounding may fall the other way in another order of sums.
        close(*outs, 3e-6 if activations == "bf16" else 2e-2)


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_is_the_product_of_one_expert(tokens, with_bias):
    from interlock_mxfp4.gpu import packed_linear

    weight, x = packed(1, 70, 96), draw(tokens, 96)
    bias = draw(70, seed=3) if with_bias else None
    found = packed_linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.dense(0, torch.float64))
    assert found.shape == (tokens, 70)
    if tokens:
        close(found, exact if bias is None else exact + bias, 2e-6)


@pytest.mark.parametrize("kind", ["gate_up", "down", "gate_up_mx", "down_mx"])
def test_the_tuner_s_problems_run(kind):
    from interlock_mxfp4.tiles import Shape
    from interlock_mxfp4.tune import problem

    sizes = (64, 96) if kind.startswith("gate_up") else (96, 64)
    shape = Shape(kind, 3, 2, 4, *sizes)
    out = problem(shape, "cpu")(MX)
    assert out.shape[1] in (64, 96, 2)
