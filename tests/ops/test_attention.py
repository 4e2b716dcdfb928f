"""Kernels and torch's attention against the reference, and rows against their neighbours."""

from __future__ import annotations

import pytest
import torch

from interlock import ops
from interlock.ops import reference, torch_ops
from opcases import CPU, TOLERANCE, batch, caches, error, of_tables, random

SHAPES = [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 2, 16), (12, 1, 32)]
MIXES = {
    "decode": ((), [(1, 1), (1, 17), (1, 128), (1, 129), (1, 200)], ()),
    "verify": ([(2, 2), (3, 50), (8, 131)], (), ()),
    "prefill": ((), (), [(200, 200), (7, 100), (1, 1), (1, 64), (65, 65), (64, 130), (33, 34)]),
    "mixed": ([(2, 40)], [(1, 9), (1, 150)], [(2, 2), (33, 70)]),
    "decode and prefill": ((), [(1, 30)], [(50, 50)]),
    "empty": ((), (), ()),
}


def attention(dtype):
    return ops.build(CPU, dtype, {}).attention


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
def test_matches_the_reference(dtype, heads, groups, dim, mix):
    b = batch(*mix)
    q = random(sum(b.query_lens), heads, dim, dtype=dtype)
    k, v = caches(b, 16, groups, dim, dtype)
    got = attention(dtype)(q, k, v, b, dim**-0.5)
    assert got.shape == (len(q), heads * dim)
    assert got.dtype == dtype
    if len(q):
        wanted = reference.attention(q.double(), k.double(), v.double(), b, dim**-0.5)
        assert error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("block", [1, 5, 8, 16, 32])
def test_any_block_size(dtype, block):
    b = batch([(3, 77)], [(1, 33), (1, 161)], [(40, 90)], block=block)
    q = random(sum(b.query_lens), 9, 64, dtype=dtype)
    k, v = caches(b, block, 3, 64, dtype)
    wanted = reference.attention(q.double(), k.double(), v.double(), b, 0.125)
    assert error(attention(dtype)(q, k, v, b, 0.125), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_torch_fallback_matches_the_reference(dtype, mix):
    b = batch(*mix)
    q = random(sum(b.query_lens), 6, 20, dtype=dtype)
    k, v = caches(b, 16, 2, 20, dtype)
    got = torch_ops.attention(q, k, v, b, 0.2)
    if len(q):
        wanted = reference.attention(q.double(), k.double(), v.double(), b, 0.2)
        assert error(got, wanted) < {**TOLERANCE, torch.float64: 1e-12}[dtype]


def test_other_head_sizes_fall_back(dtype):
    b = batch((), [(1, 30)], [(5, 9)])
    q = random(6, 2, 24, dtype=dtype)
    k, v = caches(b, 16, 1, 24, dtype)
    wanted = reference.attention(q.double(), k.double(), v.double(), b, 0.2)
    assert error(attention(dtype)(q, k, v, b, 0.2), wanted) < TOLERANCE[dtype]


def test_strided_queries(dtype):
    b = batch((), [(1, 20), (1, 140)], [(9, 30)])
    qkv = random(11, 15, 64, dtype=dtype)
    k, v = caches(b, 16, 3, 64, dtype)
    run = attention(dtype)
    assert torch.equal(
        run(qkv[:, :9], k, v, b, 0.125), run(qkv[:, :9].contiguous(), k, v, b, 0.125)
    )


def test_padding_tokens_are_zero(dtype):
    b = batch((), [(1, 20)], [(4, 4)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = random(8, 9, 64, dtype=dtype)
    got = attention(dtype)(q, k, v, b, 0.125)
    assert not got[5:].any()
    assert torch.equal(got[:5], attention(dtype)(q[:5], k, v, b, 0.125))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    together = batch([(3, 300)], [(1, 700), (1, 5), (1, 129)], [(40, 60), (7, 200)])
    k, v = caches(together, 16, 3, 64, dtype)
    q = random(sum(together.query_lens), 9, 64, dtype=dtype)
    whole = attention(dtype)(q, k, v, together, 0.125)
    start = 0
    for i, (count, context) in enumerate(zip(together.query_lens, together.context, strict=True)):
        kinds = [[], [], []]
        kinds[0 if i < 1 else 1 if i < 4 else 2] = [(count, context)]
        rows = slice(start, start + count)
        alone = attention(dtype)(q[rows], k, v, of_tables(*kinds, [together.tables[i]]), 0.125)
        assert torch.equal(alone, whole[rows])
        start += count


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(dtype, threads):
    b = batch([(2, 90)], [(1, 600), (1, 77)], [(100, 150)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = random(sum(b.query_lens), 9, 64, dtype=dtype)
    before = torch.get_num_threads()
    wanted = attention(dtype)(q, k, v, b, 0.125)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(attention(dtype)(q, k, v, b, 0.125), wanted)
    finally:
        torch.set_num_threads(before)


def test_verify_has_the_bits_of_decode(dtype):
    context, count = 290, 5
    b = batch([(count, context)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = random(count, 9, 64, dtype=dtype)
    together = attention(dtype)(q, k, v, b, 0.125)
    for i in range(count):
        one = of_tables((), [(1, context - count + i + 1)], (), b.tables)
        assert torch.equal(attention(dtype)(q[i : i + 1], k, v, one, 0.125), together[i : i + 1])


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_prefill_has_the_same_bits_in_any_chunks(dtype, chunk):
    b = batch(prefill=[(200, 200)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = random(200, 9, 64, dtype=dtype)
    run = attention(dtype)
    whole = run(q, k, v, b, 0.125)
    for start in range(0, 200, chunk):
        stop = min(start + chunk, 200)
        part = of_tables((), (), [(stop - start, stop)], b.tables)
        assert torch.equal(run(q[start:stop], k, v, part, 0.125), whole[start:stop])


def test_nan_stays_in_its_row(dtype):
    b = batch((), [(1, 200), (1, 40)], [(10, 30)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = random(12, 9, 64, dtype=dtype)
    good = attention(dtype)(q, k, v, b, 0.125)
    k[b.tables[0][0]] = float("nan")
    got = attention(dtype)(q, k, v, b, 0.125)
    assert got[0].isnan().all()
    assert torch.equal(got[1:], good[1:])


def test_large_scores_do_not_overflow(dtype):
    b = batch((), [(1, 150)], [(60, 60)])
    k, v = caches(b, 16, 3, 64, dtype)
    q = 300 * random(61, 9, 64, dtype=dtype)
    got = attention(dtype)(q, k, v, b, 0.125)
    wanted = reference.attention(q.double(), k.double(), v.double(), b, 0.125)
    assert got.isfinite().all()
    # Scores in the hundreds leave a float32 softmax three digits less.
    assert error(got, wanted) < max(1e-3, TOLERANCE[dtype])


def test_the_work_list_is_remade_for_every_batch(dtype):
    """Two batches of equal shape and different tables, as steps of one sequence have."""
    run = attention(dtype)
    for seed in range(3):
        b = batch((), [(1, 40 + seed), (1, 300)])
        k, v = caches(b, 16, 3, 64, dtype)
        q = random(2, 9, 64, seed=seed, dtype=dtype)
        wanted = reference.attention(q.double(), k.double(), v.double(), b, 0.125)
        assert error(run(q, k, v, b, 0.125), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("tables", [[[2, 3, 4]], [[5, 1, 2, 0]], [[3], [0, 1]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decode_row_without_kernels_reads_the_cache_where_it_lies(tables, dtype, monkeypatch):
    rows = [(1, 4 * len(table) - 1) for table in tables]
    b = of_tables((), rows, (), tables)
    k, v = caches(b, 4, 2, 8, dtype)
    q = random(len(rows), 6, 8, seed=3, dtype=dtype)
    copied = []
    indexed = torch.Tensor.__getitem__

    def watch(tensor, index):
        result = indexed(tensor, index)
        pools = (k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr())
        if tensor.untyped_storage().data_ptr() in pools:
            copied.append(result.untyped_storage().data_ptr() not in pools)
        return result

    monkeypatch.setattr(torch.Tensor, "__getitem__", watch)
    got = torch_ops.attention(q, k, v, b, 0.3)
    monkeypatch.undo()
    assert copied
    assert not any(copied)
    assert error(got, reference.attention(q, k, v, b, 0.3)) < 1e-6


@pytest.mark.parametrize(
    ("table", "context", "ranges"),
    [
        ([4], 3, [(16, 19)]),
        ([1, 2, 5], 12, [(4, 12), (20, 24)]),
        ([3, 2, 1], 9, [(12, 16), (8, 12), (4, 5)]),
    ],
)
def test_runs_of_consecutive_blocks_are_one_range(table, context, ranges):
    assert torch_ops.runs(table, 4, context) == ranges
