"""The pool and the ledger against brute-force models of themselves."""

from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.cache.blocks import BlockPool, OutOfBlocksError, blocks_for
from interlock.cache.ledger import Ledger
from interlock.cache.storage import zeros


@given(st.lists(st.tuples(st.sampled_from(["allocate", "take", "drop"]), st.integers(0, 7))))
def test_pool_never_loses_or_shares_a_block_by_accident(operations):
    pool, held = BlockPool(8), []
    for name, value in operations:
        if name == "allocate" and value > pool.num_free:
            with pytest.raises(OutOfBlocksError):
                pool.allocate(value)
        elif name == "allocate":
            blocks = pool.allocate(value)
            assert not {b for h in held for b in h} & set(blocks)
            held.append(blocks)
        elif held:
            index = value % len(held)
            if name == "take":
                pool.take(held[index])
                held.append(list(held[index]))
            else:
                pool.drop(held.pop(index))
        pool.check(held)


def test_dropping_twice_and_sharing_a_free_block_are_errors():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.drop([block])
    with pytest.raises(ValueError, match="free already"):
        pool.drop([block])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.take([block])


def test_check_finds_a_leak_and_a_foreign_reference():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.check([blocks, blocks])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks


def test_reservations_are_invisible_until_committed():
    ledger, seen = Ledger(), []
    ledger.reserve("r", "k4", 1, num_tokens=4, on_commit=lambda k, v: seen.append((k, v)))
    ledger.reserve("r", "k8", 2, num_tokens=8)
    assert ledger.find("k4") is None
    ledger.commit("r", 5)
    assert (ledger.find("k4"), ledger.find("k8"), seen) == (1, None, [("k4", 1)])
    ledger.commit("r", 8)
    assert ledger.find("k8") == 2
    assert ledger.num_reserved == 0


def test_aborted_reservations_never_appear_and_committed_keys_stay():
    ledger, dropped = Ledger(), []
    ledger.reserve("r", "a", 1, num_tokens=4)
    ledger.reserve("r", "b", 2, num_tokens=8, on_abort=lambda k, v: dropped.append(k))
    ledger.commit("r", 4)
    ledger.abort("r")
    ledger.abort("r")
    ledger.commit("r", 100)
    assert (ledger.find("a"), ledger.find("b"), dropped) == (1, None, ["b"])
    assert ledger.retract("a") == 1
    assert ledger.find("a") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cache_memory_is_zero_aligned_and_untouched(dtype):
    before = psutil.Process().memory_info().rss
    cache = zeros((1024, 64, 1024), dtype, torch.device("cpu"))
    grown = psutil.Process().memory_info().rss - before
    assert grown < cache.nbytes / 4
    assert cache.data_ptr() % 64 == 0
    assert not cache[5].any()
    cache[7, 1, 2] = 3
    assert cache.sum() == 3
