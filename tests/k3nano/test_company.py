"""Without float64: with one kernel for all products a request's tokens do not depend on company."""

from __future__ import annotations

import pytest

from k3nano.conftest import MODEL
from k3nano.play import engine, run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_no_token(prompts, dtype):
    few = prompts[2::2]

    def tokens(together):
        built = engine(MODEL, dtype=dtype, batch_invariant=True, max_num_batched_tokens=1024)
        if together:
            return run(built, few)
        return [run(built, [prompt])[0] for prompt in few]

    assert tokens(together=True) == tokens(together=False)
