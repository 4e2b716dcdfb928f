"""The model: loading checks, chunking, caches, dtypes and formats, against the formulas."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modelrun
import tinymodels
from interlock import ops
from interlock.engine.batch import Batch, Row
from interlock.engine.request import Request, SamplingParams
from interlock.errors import PluginError, WeightsError
from interlock.layers.rope import cos_sin_table, inverse_frequencies
from interlock.models.registry import MODELS, build_model, merged_models
from interlock.weights.config import ModelConfig, RopeScaling, load_config
from interlock.weights.config_kimi import KIMI
from interlock.weights.resolve import local_files
from tinymodels import TinySpec

ALL = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
IDS = [int(i) for i in np.random.default_rng(9).integers(3, 500, 45)]


def plain_logits(spec: TinySpec, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] straight from the formulas, in float64, without a cache or a batch."""
    weights = {k: torch.from_numpy(v).double() for k, v in tinymodels.tiny_weights(spec).items()}
    heads, kv_heads, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt()
        return x * scale * weights[f"{name}.weight"]

    # In float32 like every checkpoint's training code: at position 45 it shows in the 6th digit.
    frequencies = 1 / spec.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(len(ids), dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    causal = torch.full((len(ids), len(ids)), float("-inf")).triu(1).double()
    x = weights["model.embed_tokens.weight"][ids]
    for index in range(spec.num_hidden_layers):
        layer = f"model.layers.{index}"
        y = norm(f"{layer}.input_layernorm", x)
        q, k, v = (
            linear(f"{layer}.self_attn.{part}_proj", y).view(len(ids), -1, dim) for part in "qkv"
        )
        if spec.qk_norm:
            q, k = norm(f"{layer}.self_attn.q_norm", q), norm(f"{layer}.self_attn.k_norm", k)
        q, k = rotate(q), rotate(k).repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5 + causal
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        x = x + linear(f"{layer}.self_attn.o_proj", mixed)
        y = norm(f"{layer}.post_attention_layernorm", x)
        gate, up = linear(f"{layer}.mlp.gate_proj", y), linear(f"{layer}.mlp.up_proj", y)
        x = x + linear(f"{layer}.mlp.down_proj", torch.nn.functional.silu(gate) * up)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm("model.norm", x) @ head.T


def check(model: Any, spec: TinySpec, *, atol: float = 1e-9, chunk: int | None = None) -> None:
    actual = modelrun.logits(model, IDS, chunk).double()
    torch.testing.assert_close(actual, plain_logits(spec, IDS), rtol=0, atol=atol)


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_every_architecture_against_the_formulas(
    tmp_path: Path, architecture: str, chunk: int | None
) -> None:
    spec = TinySpec(architecture=architecture)
    folder = tinymodels.write_tiny_hf(tmp_path / "m", architecture)
    check(modelrun.load(folder), spec, chunk=chunk)


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"rope_theta": 1e6, "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_options_against_the_formulas(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "m", shards=2, **options)
    check(modelrun.load(folder), TinySpec(**options))


def test_tied_head_ignores_a_stored_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"lm_head.weight": np.ones((512, 64), np.float32)}
    folder = tinymodels.write_tiny_hf(tmp_path / "m", tie_word_embeddings=True, extra=extra)
    check(modelrun.load(folder), TinySpec(tie_word_embeddings=True))
    assert not caplog.records


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", ALL[3]])
def test_gguf_against_the_formulas(tmp_path: Path, architecture: str) -> None:
    spec = TinySpec(architecture=architecture)
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture)
    # The file keeps eps in float32.
    check(modelrun.load(path), spec, atol=1e-5)


def test_rope_divisors_of_a_gguf_file(tmp_path: Path) -> None:
    """A Llama 3 file stretches its frequencies by a tensor; the same as the llama3 rule."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=64)
    config = load_config(local_files(tinymodels.write_tiny_gguf(tmp_path / "a.gguf")))
    plain, _ = inverse_frequencies(config)
    stretched, _ = inverse_frequencies(_evolve(config, rope_scaling=scaling))
    extra = {"rope_freqs.weight": (plain / stretched).numpy()}
    path = tinymodels.write_tiny_gguf(tmp_path / "b.gguf", extra=extra)
    table = modelrun.load(path).cos_sin
    expected = cos_sin_table(_evolve(config, rope_scaling=scaling), 512)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(table, cos_sin_table(config, 512), atol=1e-2)
    bad = {"rope_freqs.weight": np.ones(4, np.float32)}
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight is \[4\] instead of \[8\]"):
        modelrun.load(tinymodels.write_tiny_gguf(tmp_path / "c.gguf", extra=bad))


def _evolve(config: ModelConfig, **changes: Any) -> ModelConfig:
    import attrs

    return attrs.evolve(config, **changes)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_1"])
def test_dtypes_and_formats_run(
    tmp_path: Path, dtype: torch.dtype, atol: float, quant: str
) -> None:
    """Lower precision stays near the float64 run of the same file."""
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant=quant)
    expected = modelrun.logits(modelrun.load(path), IDS)
    actual = modelrun.logits(modelrun.load(path, dtype), IDS, chunk=16)
    error = (actual.double() - expected).abs()
    assert error.max() < atol
    assert error.mean() < atol / 10


def test_rows_of_a_batch_do_not_touch_each_other(tmp_path: Path) -> None:
    model = modelrun.load(tinymodels.write_tiny_hf(tmp_path / "m"))
    alone = [modelrun.logits(model, ids)[-1] for ids in (IDS[:9], IDS[9:30])]
    rows = []
    for index, ids in enumerate((IDS[:9], IDS[9:30])):
        request = Request(str(index), ids, SamplingParams())
        request.block_table = list(range(10 * index, 10 * index + 8))
        rows.append(Row(request, 0, len(ids), [], 1, is_prefilling=True))
    hidden = model.forward(Batch.build(rows, modelrun.BLOCK_SIZE, modelrun.CPU))
    assert hidden.shape == (2, 64)
    torch.testing.assert_close(model.logits(hidden), torch.stack(alone), rtol=0, atol=1e-12)


def test_inner_chunk_needs_no_logits(tmp_path: Path) -> None:
    """A chunk without logits returns nothing and still writes every layer's cache."""
    model = modelrun.load(tinymodels.write_tiny_hf(tmp_path / "m"))
    expected = modelrun.logits(model, IDS)[-1]
    model.allocate_caches(64, modelrun.BLOCK_SIZE)
    request = Request("r", IDS, SamplingParams())
    request.block_table = list(range(16))
    for start, stop, logits in ((0, 20, 0), (20, 44, 0), (44, 45, 1)):
        row = Row(request, start, stop - start, [], logits, is_prefilling=True)
        hidden = model.forward(Batch.build([row], modelrun.BLOCK_SIZE, modelrun.CPU))
        assert hidden.shape == (logits, 64)
        assert model.logits(hidden).shape == (logits, 512)
    torch.testing.assert_close(model.logits(hidden)[0], expected, rtol=0, atol=1e-12)


def test_cache_sizes_and_copies(tmp_path: Path) -> None:
    model = modelrun.load(tinymodels.write_tiny_hf(tmp_path / "m"), torch.float32)
    assert model.cache_bytes_per_block(16) == 2 * 2 * 16 * 2 * 16 * 4
    caches = [c for la in model.layers for c in (la.attention.k_cache, la.attention.v_cache)]
    assert sum(c.nbytes for c in caches) == 64 * model.cache_bytes_per_block(modelrun.BLOCK_SIZE)
    for cache in caches:
        cache.copy_(torch.arange(64.0).view(64, 1, 1, 1).expand_as(cache))
    model.copy_blocks([(3, 10), (5, 11), (3, 12)])
    for cache in caches:
        assert cache[[10, 11, 12, 9], 0, 0, 0].tolist() == [3.0, 5.0, 3.0, 9.0]


def test_counts(tmp_path: Path) -> None:
    model = modelrun.load(tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0"))
    weights = tinymodels.tiny_weights(TinySpec())
    assert model.num_parameters == sum(array.size for array in weights.values())
    assert model.weight_bytes < model.num_parameters * 1.1


def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, name: str) -> Any:
        raise AssertionError(f"{name} was read before the check")

    monkeypatch.setattr("interlock.weights.safetensors_folder.SafetensorsSource.get", fail)


def test_missing_tensors_are_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    folder = tinymodels.write_tiny_hf(tmp_path / "m", drop=names)
    no_reads(monkeypatch)
    with pytest.raises(WeightsError, match=r"2 of 21 tensors are missing.*up_proj.*lm_head"):
        modelrun.load(folder)


def test_missing_quantized_tensors_are_named(tmp_path: Path) -> None:
    drop = ["blk.1.ffn_up.weight"]
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", drop=drop)
    with pytest.raises(WeightsError, match=r"1 of \d+ tensors are missing.*1\.mlp\.up_proj"):
        modelrun.load(path)


def test_a_quantized_file_without_a_head_is_tied(tmp_path: Path) -> None:
    """It computes what a file with a copy of the embedding as its head computes."""
    tied: dict[str, Any] = {"quant": "Q8_0", "tie_word_embeddings": True}
    spec = TinySpec(tie_word_embeddings=True)
    head = {"output.weight": tinymodels.tiny_weights(spec)["model.embed_tokens.weight"]}
    without = tinymodels.write_tiny_gguf(tmp_path / "without.gguf", **tied)
    copied = tinymodels.write_tiny_gguf(tmp_path / "copied.gguf", extra=head, **tied)
    actual, wanted = (modelrun.logits(modelrun.load(path), IDS) for path in (without, copied))
    torch.testing.assert_close(actual, wanted)
    assert wanted.std() > 0


def test_missing_bias_is_an_error(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.bias"
    folder = tinymodels.write_tiny_hf(tmp_path / "m", "Qwen2ForCausalLM", drop=[name])
    with pytest.raises(WeightsError, match=name):
        modelrun.load(folder)


def test_wrong_shapes_are_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "m", config={"intermediate_size": 96})
    no_reads(monkeypatch)
    with pytest.raises(
        WeightsError, match=r"gate_proj\.weight is \[128, 64\] instead of \[96, 64\].*and 1 more"
    ):
        modelrun.load(folder)


def test_unexpected_tensors_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"extra.{i}.weight": np.zeros((2, 2), np.float32) for i in range(9)}
    folder = tinymodels.write_tiny_hf(tmp_path / "m", extra=extra)
    with caplog.at_level(logging.WARNING):
        modelrun.load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        "9 tensors of the model's files are not used: extra.0.weight, extra.1.weight, "
        "extra.2.weight, extra.3.weight, extra.4.weight and 4 more"
    ]


def test_biases_that_the_configuration_does_not_know_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.layers.0.mlp.up_proj.bias": np.zeros(128, np.float32)}
    modelrun.load(tinymodels.write_tiny_hf(tmp_path / "m", extra=extra))
    assert "up_proj.bias" in caplog.text


def test_progress_reaches_one(tmp_path: Path) -> None:
    files = local_files(tinymodels.write_tiny_hf(tmp_path / "m"))
    shares: list[float] = []
    build_model(
        files,
        load_config(files),
        ops=ops.build(modelrun.CPU, torch.float32, {}),
        linear_method=lambda **layer: None,
        extra_models={},
        dtype=torch.float32,
        device=modelrun.CPU,
        progress=lambda what, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_registry() -> None:
    assert set(MODELS) == {*ALL, *KIMI}
    assert merged_models({"NewForCausalLM": dict})["NewForCausalLM"] is dict
    with pytest.raises(PluginError, match="LlamaForCausalLM"):
        merged_models({"LlamaForCausalLM": dict})


def test_yarn_scales_attention() -> None:
    """Known values: factor 4 gives 0.1 ln 4 + 1; frequency 0 is kept, the last divided by 4."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=2048),
    )
    frequencies, scale = inverse_frequencies(config)
    assert scale == pytest.approx(1.138629, abs=1e-6)
    assert frequencies[0] == 1.0
    assert float(frequencies[-1]) == pytest.approx(10000 ** (-62 / 64) / 4)
    table = cos_sin_table(config, 3)
    assert table.shape == (3, 2, 32)
    assert torch.allclose(table[0, 0], torch.tensor(scale))
