"""Logits of tiny random models, against transformers: every architecture and RoPE variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import modelrun
import tinymodels

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 4}, {}),
    "llama-linear": (
        "LlamaForCausalLM",
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama-llama3": ("LlamaForCausalLM", {"rope_theta": 500000.0}, {"rope_scaling": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", {}, {"rope_scaling": YARN}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        {},
        {"rope_scaling": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16}},
    ),
    "llama-yarn-attention": (
        "LlamaForCausalLM",
        {},
        {"rope_scaling": YARN | {"attention_factor": 1.3, "truncate": False}},
    ),
    "llama-rope-parameters": (
        "LlamaForCausalLM",
        {},
        {"rope_parameters": LLAMA3 | {"rope_theta": 20000.0}, "rope_theta": None},
    ),
    "mistral": ("MistralForCausalLM", {"rope_theta": 1e6}, {}),
    "mistral-wide-heads": ("MistralForCausalLM", {"head_dim": 32}, {}),
    "qwen2": ("Qwen2ForCausalLM", {}, {}),
    "qwen2-tied-yarn": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True, "rope_theta": 1e6},
        {"rope_scaling": YARN},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}, {}),
    "qwen3-wide-heads": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}, {}),
}


def token_ids(count: int = 200) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 500, (count,), generator=generator).tolist()


def use_float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers normalizes in float32 even in a float64 model; that would hide small errors."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))

    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def oracle(path: Path, ids: list[int], **options: Any) -> torch.Tensor:
    if "gguf_file" in options and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", **options
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("case", CASES)
def test_same_logits_as_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    architecture, spec, config = CASES[case]
    folder = tinymodels.write_tiny_hf(tmp_path / "model", architecture, config=config, **spec)
    ids = token_ids()
    use_float64_norms(monkeypatch)
    expected = oracle(folder, ids)
    actual = modelrun.logits(modelrun.load(folder), ids)
    # Softmax runs in float32 in transformers' eager attention.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_gguf_gives_the_same_logits_as_its_folder(tmp_path: Path, architecture: str) -> None:
    """The row permutation of llama files and the name mapping, end to end."""
    ids = token_ids(60)
    folder = tinymodels.write_tiny_hf(tmp_path / "model", architecture)
    file = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture)
    expected = oracle(folder, ids)
    actual = modelrun.logits(modelrun.load(file), ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("quant", ["F16", "Q4_1", "Q8_0"])
def test_quantized_gguf_against_transformers_reader(tmp_path: Path, quant: str) -> None:
    pytest.importorskip("accelerate")
    file = tinymodels.write_tiny_gguf(tmp_path / "tiny.gguf", quant=quant)
    ids = token_ids(60)
    expected = oracle(tmp_path, ids, gguf_file=file.name)
    actual = modelrun.logits(modelrun.load(file), ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def test_chat_prompt_tokens_match_transformers(tmp_path: Path) -> None:
    from interlock.chat import ChatTemplate
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import local_files

    folder = tinymodels.write_tiny_hf(tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    files = local_files(folder)
    template, ours = ChatTemplate.load(files), Tokenizer.load(files)
    assert template is not None
    messages = [
        {"role": "user", "content": "Größe 123 <|im_end|> 東京 🚀"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "x\n\n  y"},
    ]
    text = template.render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


TEXTS = [
    "The capital of France is Paris. Once upon a time, in a village by the sea, there was",
    "def fibonacci(n):\n    if n < 2:\n\t\treturn n  # 12345\r\n",
    "Die größte Stadt in Deutschland ist — 東京は日本の — Москва 👩‍👩‍👧‍👦🍕",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.model
def test_smollm2_chooses_the_same_token_everywhere() -> None:
    """Tokens equal, and at every position of real text the same next token, in float64.

    Texts have no exotic numerals: transformers drops the file's rule that digits stand alone.
    """
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import resolve

    files = resolve("smollm2-135m")
    folder, name = files.path.parent, files.path.name
    tokenizer = Tokenizer.load(files)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    ids: list[int] = []
    for text in TEXTS:
        ids += tokenizer.encode(text)
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    expected = oracle(folder, ids, gguf_file=name)
    with torch.inference_mode():
        actual = modelrun.logits(modelrun.load(files.path), ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
