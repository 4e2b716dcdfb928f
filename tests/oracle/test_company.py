"""The real model in its default dtype: a request's tokens do not depend on its company.

No float64 here. Kernels of the core give a row the same bits in any batch, so this is exact.
"""

from __future__ import annotations

import pytest
import torch

from interlock.api import LLM
from interlock.engine.request import SamplingParams
from interlock.ops import kernel_problem
from oracle.prompts import PROMPTS

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        kernel_problem(torch.bfloat16) is not None, reason="torch's kernels go by batch size"
    ),
]


def params(index: int) -> SamplingParams:
    """Greedy, and sampled with a seed, in turns."""
    sampled = index % 2
    return SamplingParams(
        temperature=float(sampled), seed=index, max_tokens=48, ignore_eos=True, top_p=0.95
    )


@pytest.fixture(scope="module")
def alone(smollm):
    llm = LLM(str(smollm.path), dtype="bfloat16", max_model_len=1024)
    return [llm.generate([p], params(i))[0].token_ids for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("chunk", [5, 64, 1024])
def test_neighbours_and_chunks_change_no_bit(smollm, alone, chunk):
    llm = LLM(
        str(smollm.path),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=max(chunk, 32),
        max_num_seqs=24,
    )
    if chunk == 5:
        llm.engine.scheduler.limits = [("short", Short())]
    together = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    assert [completion.token_ids for completion in together] == alone
    assert llm.engine.stats().preemptions_total == 0


class Short:
    """Chunks of five tokens."""

    def clip(self, request, start, end):
        return min(end, start + 5)
