"""Perplexity: windows, figures, and the command."""

from __future__ import annotations

import json
import math

import pytest
import torch

import modelrun
from interlock.bench.perplexity import Quality, qualities, windows
from interlock.bench.spec import Target
from interlock.cli import main
from interlock.errors import ConfigError
from tinymodels import write_tiny_hf


def test_windows_are_spread_without_overlap():
    assert windows(range(10), 3, 2) == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(100), 10, 5) == [list(range(i, i + 10)) for i in (0, 20, 40, 60, 80)]
    assert windows(range(7), 3, 99) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="the text has 2 tokens, a window 3"):
        windows([1, 2], 3, 1)


def test_figures():
    quality = Quality("q", tokens=4, bytes=8, nats=4 * math.log(3))
    assert quality.perplexity == pytest.approx(3)
    assert quality.bits_per_byte == pytest.approx(4 * math.log2(3) / 8)


def test_only_engines_can_be_scored():
    with pytest.raises(ConfigError, match="only interlock's own configurations"):
        qualities([Target(kind="transformers")], [[1, 2]], None)


def test_the_command_scores_like_the_model_itself(tmp_path, capsys):
    folder = write_tiny_hf(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog " * 8)
    code = main(
        ["bench", "perplexity", "--model", str(folder), "--dtype", "float64", "--text", str(text),
         "--window", "24", "--windows", "2", "--against", "engine.dtype=float32", "--json"]
    )  # fmt: skip
    assert code == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["tokens"] == 2 * 23
    assert first["worse"] == [1.0, 1.0]
    assert second["nats"] == pytest.approx(first["nats"], rel=1e-5)
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import local_files

    ids = Tokenizer.load(local_files(folder)).encode(text.read_text(), add_special_tokens=False)
    model = modelrun.load(folder)
    nats = 0.0
    for part in windows(ids, 24, 2):
        scores = torch.log_softmax(modelrun.logits(model, part), -1)
        nats -= float(scores[:-1].gather(1, torch.tensor(part[1:])[:, None]).sum())
    assert first["nats"] == pytest.approx(nats, rel=1e-6)
    assert first["perplexity"] == pytest.approx(math.exp(nats / first["tokens"]), rel=1e-6)


def test_a_text_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["bench", "perplexity", "--text", str(tmp_path / "no.txt")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("interlock: error: --text")
    assert len(error.splitlines()) == 1
