"""Greedy tokens equal to transformers' for the same GGUF, and to our own in any company.

Everything runs in float64, where rounding cannot decide between two tokens that are not tied; a
difference is accepted only if the oracle's own top two logits are within `NEAR_TIE` there.
"""

from __future__ import annotations

import pytest
import torch

from interlock.api import LLM
from interlock.engine.request import SamplingParams
from oracle.prompts import PROMPTS

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
# transformers computes norms and softmax in float32 even for a float64 model, which moves its
# logits by about 2e-5. A preference is at least a thousand times that.
NEAR_TIE = 1e-4


def generate(files, prompts, **engine):
    llm = LLM(str(files.path), dtype="float64", max_model_len=1024, **engine)
    tokens = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.memory.pool.usage == 0
    return tokens, llm


@pytest.fixture(scope="module")
def solo(smollm):
    """Each prompt alone in the engine: the oracle of the neighbour tests."""
    llm = LLM(str(smollm.path), dtype="float64", max_model_len=1024)
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_neighbours_and_chunks_change_nothing(smollm, solo, chunk):
    tokens, _ = generate(smollm, PROMPTS[:16], max_num_batched_tokens=chunk, max_num_seqs=16)
    assert tokens == solo[:16]


def test_preemption_changes_nothing(smollm, solo):
    tokens, llm = generate(smollm, PROMPTS[:16], num_blocks=30, max_num_seqs=16)
    assert llm.engine.stats().preemptions_total > 0
    assert tokens == solo[:16]


def test_tokens_equal_those_of_transformers(smollm, solo):
    transformers = pytest.importorskip("transformers")
    # Without `dequantize` it may compute with packed weights in float32.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm.path.parent),
        gguf_file=smollm.path.name,
        dtype=torch.float64,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    tokenizer = LLM(str(smollm.path), dtype="float64", num_blocks=8).tokenizer
    equal = 0
    for prompt, tokens in zip(PROMPTS, solo, strict=True):
        ids = tokenizer.encode(prompt)
        expected, margins = hf_greedy(model, ids, len(tokens))
        if tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
            assert margins[at] < NEAR_TIE, (prompt, at, margins[at])
        equal += tokens == expected
    assert equal >= len(PROMPTS) - 2


@torch.inference_mode()
def hf_greedy(model, ids, count):
    """transformers' greedy tokens, and the distance of its top two logits at each."""
    generated = model.generate(
        torch.tensor([ids]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = [float((top := logits[0].topk(2).values)[0] - top[1]) for logits in generated.logits]
    return generated.sequences[0, len(ids) :].tolist(), margins
