from __future__ import annotations

import pytest
import torch

from interlock.layers.projection import rows_of
from interlock.parallel.group import SINGLE, TensorParallel, share
from interlock.weights.config import load_config
from interlock.weights.resolve import local_files
from interlock.weights.source import open_weights
from tinymodels import write_tiny_gguf


@pytest.mark.parametrize(
    ("total", "unit"), [(64, 1), (96, 32), (64, 32), (7, 1), (100, 32), (0, 1)]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shares_are_whole_units_side_by_side(total, unit, size):
    ranges = [share(total, unit, rank, size) for rank in range(size)]
    assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, total)
    units = [-(-(b - a) // unit) for a, b in ranges]
    assert max(units) - min(units) <= 1
    assert all(a % unit == 0 for a, b in ranges if a < total)


def test_more_ranks_than_heads_hold_the_same_head():
    rows = [rows_of(32, 16, TensorParallel(rank, 4), sharded=True) for rank in range(4)]
    assert rows == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_one_rank_gives_back_what_it_gets():
    x = torch.ones(2, 3)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_gather(x, [3]) is x
    assert SINGLE.least(5) == 5


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F32", "BF16"])
def test_parts_of_block_formats_are_the_parts_of_their_numbers(tmp_path, kind):
    files = local_files(write_tiny_gguf(tmp_path / "m.gguf", quant=kind))
    name = "model.layers.0.mlp.down_proj.weight"
    with open_weights(files, load_config(files)) as source:
        whole = source.get(name)
        dense = whole.dense(torch.float32)
        rows, columns = whole.part(0, 8, 24), whole.part(1, 32, 96)
        assert torch.equal(rows.dense(torch.float32), dense[8:24])
        assert torch.equal(columns.dense(torch.float32), dense[:, 32:96])
        assert (rows.info.shape, columns.info.shape) == ((16, 128), (64, 64))
        blocks = whole.blocks()
        if blocks is not None:
            per_row = blocks.shape[1]
            assert torch.equal(rows.blocks(), blocks[8:24])
            assert torch.equal(columns.blocks(), blocks[:, per_row // 4 : per_row * 3 // 4])
