"""k3-nano's training code: what it computes, and what it exports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

TRAINING = Path(__file__).resolve().parents[2] / "training" / "k3_nano"
F64 = torch.float64


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))


@pytest.fixture
def config():
    return json.loads((TRAINING / "config.json").read_text())


def test_chunks_are_the_recurrence(config):
    import model

    torch.manual_seed(0)
    net = model.K3Nano(config).to(F64).eval()
    for mix in (m for m in net.modules() if isinstance(m, model.Mix)):
        torch.nn.init.normal_(mix.proj, std=0.1)
    ids = torch.randint(0, 4096, (2, 41))
    with torch.no_grad():
        difference = net.logits(ids) - net.logits(ids, chunked=False)
    assert float(difference.abs().max()) < 1e-10


def test_quantized_weights_are_exact_when_packed_and_unpacked():
    import model

    weight = torch.randn(5, 64)
    codes, scales = model.quantize(weight)
    values = model.dequantize(codes, scales)
    assert torch.equal(model.unpack(model.pack(codes)), codes)
    assert torch.equal(model.dequantize(*model.quantize(values)), values)
    assert float((weight - values).abs().max()) < 0.5 * float(weight.abs().max())
    # Its gradient is that of the weight itself.
    leaf = weight.clone().requires_grad_()
    (model.fake_quantize(leaf) * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(weight, 3.0))


def test_an_export_is_the_model_that_was_trained(config, tmp_path):
    import export
    import model

    torch.manual_seed(1)
    net = model.K3Nano(config)
    for parameter in net.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    (tmp_path / "tokenizer").mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    export.export(net, tmp_path / "tokenizer", tmp_path / "out")
    loaded = export.load_checkpoint(tmp_path / "out", torch.float32)
    ids = torch.randint(0, 4096, (1, 20))
    with torch.no_grad():
        close = (loaded.logits(ids) - net.eval().logits(ids)).abs().max()
    # What fits bfloat16 is exported as it is, and so are quantized experts.
    assert float(close) < 1e-4
    again = export.checkpoint(loaded)
    stored = export.checkpoint(net)
    packed = [n.removesuffix("_packed") for n in stored if n.endswith("weight_packed")]
    assert len(packed) == 11 * 16 * 3

    def value(tensors, name):
        codes = model.unpack(tensors[f"{name}_packed"])
        return model.dequantize(codes, tensors[f"{name}_scale"])

    # A group may get a smaller scale the second time, with the same values.
    assert all(torch.equal(value(again, name), value(stored, name)) for name in packed)
    rest = [n for n in stored if ".experts." not in n or "shared" in n]
    assert all(torch.equal(again[name], stored[name]) for name in rest)


def test_kneser_ney_is_a_distribution_and_knows_what_it_has_seen(monkeypatch):
    import ngram

    monkeypatch.setattr(ngram, "VOCAB_SIZE", 6)
    monkeypatch.setattr(ngram, "PAD", 5)
    rng = np.random.default_rng(0)
    model = ngram.KneserNey([rng.integers(0, 4, 200) for _ in range(5)])
    context = [1, 2, 0, 3]
    probs = [np.exp(model.log_probs(np.array([*context, t]))[-1]) for t in range(6)]
    assert abs(sum(probs) - 1) < 1e-9
    assert min(probs) > 0
    repeated = ngram.KneserNey([np.array([0, 1, 2, 3] * 50)])
    assert np.exp(repeated.log_probs(np.array([0, 1, 2, 3, 0, 1]))[-1]) > 0.9


def test_what_is_held_out_depends_on_the_name_alone():
    import data

    names = [f"Genesis {i}" for i in range(2000)]
    share = sum(map(data.held_out, names)) / len(names)
    assert 0.015 < share < 0.045
    assert [data.held_out(n) for n in names] == [data.held_out(n) for n in names]


def test_the_drafters_block_sees_the_context_before_its_anchor_and_no_more(config):
    import drafter

    torch.manual_seed(0)
    net = drafter.Drafter(drafter.CONFIG).eval()
    taps, embed = torch.randn(1, 30, 480), torch.randn(4160, 160)
    anchors, first = torch.tensor([[5, 17]]), torch.tensor([[7, 8]])

    def hidden(rows):
        with torch.no_grad():
            return net.hidden(net.context(rows), anchors, first, embed)

    base, later = hidden(taps), taps.clone()
    later[:, 17:] += 1.0
    assert torch.equal(hidden(later), base)
    later[:, 10] += 1.0
    changed = hidden(later)
    assert torch.equal(changed[:, 0], base[:, 0])
    assert not torch.allclose(changed[:, 1], base[:, 1])
    assert base.shape == (1, 2, 8, 160)
