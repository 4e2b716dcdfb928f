"""The real SmolLM2-135M-Instruct: its file, its tokenizer, its template and one known answer."""

from __future__ import annotations

import pytest
import torch

import modelrun
from interlock.chat import ChatTemplate
from interlock.tokenizer import Tokenizer
from interlock.weights.config import load_config
from interlock.weights.resolve import ModelFiles, resolve

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve("smollm2-135m")


def test_configuration(files: ModelFiles) -> None:
    config = load_config(files)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.max_position_embeddings) == (100000.0, 8192)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.kv_bytes_per_token(2) == 23040


def test_tokenizer(files: ModelFiles) -> None:
    tokenizer = Tokenizer.load(files)
    assert tokenizer.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    assert not tokenizer.add_bos
    text = "<|im_start|>user\nGröße 東京 🚀 x²\n\n\tend<|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_template(files: ModelFiles) -> None:
    template = ChatTemplate.load(files)
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_capital_of_france(files: ModelFiles) -> None:
    tokenizer = Tokenizer.load(files)
    model = modelrun.load(files.path, torch.float32)
    logits = modelrun.logits(model, tokenizer.encode("The capital of France is"))
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
