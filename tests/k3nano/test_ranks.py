"""The trained hybrid model gives the same greedy tokens from one, two, four and eight ranks."""

from __future__ import annotations

import pytest

from k3nano.conftest import MODEL
from parallel.ranks import generate

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_any_number_of_ranks(prompts, oracle, tp):
    few = prompts[1::3]
    answer = generate(MODEL, few, [GREEDY] * len(few), tp=tp, max_num_batched_tokens=64)
    assert answer["tp"] == tp
    assert answer["tokens"] == oracle[1::3]
