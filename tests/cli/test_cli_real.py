"""Commands with a real engine: a tiny random model, and once the default one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlock.bench.report import Report
from interlock.engine.engine import Engine
from interlock.settings import load_settings
from tinymodels import write_tiny_gguf


def interlock(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interlock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **kwargs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> list[str]:
    """Options that choose a tiny model and keep its cache small."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return ["--model", str(path), "--num-blocks", "64", "--threads", "1", "--dtype", "float32"]


GREEDY = ["--temperature", "0", "--ignore-eos"]


def generate(tiny: list[str], *words: str) -> dict[str, Any]:
    done = interlock("generate", *tiny, "--json", *words)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_generate_streams_the_same_text_that_json_reports(tiny: list[str]) -> None:
    words = [*GREEDY, "--max-tokens", "12", "The capital of France is"]
    record = generate(tiny, *words)
    (choice,) = record["choices"]
    assert len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == "length"
    assert record["usage"]["completion_tokens"] == 12
    plain = interlock("generate", *tiny, "--raw", *words)
    assert (plain.returncode, plain.stdout) == (0, choice["text"])
    assert plain.stderr == ""


def test_a_seed_repeats_and_samples_differ(tiny: list[str]) -> None:
    words = ["--temperature", "1", "--seed", "5", "-n", "2", "--max-tokens", "16", "Once"]
    first, second = generate(tiny, *words), generate(tiny, *words)
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["token_ids"] != first["choices"][1]["token_ids"]


def test_chat_answers_a_prompt_from_stdin(tiny: list[str]) -> None:
    done = interlock("chat", *tiny, "--max-tokens", "5", "--temperature", "0", input="Hello?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")


def test_a_prompt_that_is_too_long_is_one_line(tiny: list[str]) -> None:
    done = interlock("generate", *tiny, "word " * 2000)
    assert done.returncode == 1
    assert done.stderr.startswith("interlock: error: ")
    assert done.stderr.count("\n") == 1


def test_the_engine_says_what_it_does_while_it_starts(tiny: list[str]) -> None:
    said: list[str] = []
    settings = load_settings(flags={"engine.model": tiny[1], "engine.dtype": "float32"})
    Engine(settings, progress=lambda what, _: said.append(what)).close()
    assert list(dict.fromkeys(said)) == [
        "preparing kernels (the first start compiles them)",
        "loading weights",
        "allocating the KV cache",
    ]


def test_doctor_finds_nothing_broken(tiny: list[str]) -> None:
    done = interlock("doctor", "--json", *tiny)
    assert done.returncode == 0, done.stdout
    areas = {f["area"]: f for f in json.loads(done.stdout)["findings"]}
    assert areas["dtype"]["value"].startswith("float32")
    assert any(area.startswith("op ") for area in areas)
    assert areas["model"]["level"] == "ok"


def test_inspect_knows_the_model(tiny: list[str]) -> None:
    done = interlock("models", "inspect", tiny[1], "--json")
    assert json.loads(done.stdout)["architecture"] == "LlamaForCausalLM"


def test_bench_alternates_two_real_engines(tiny: list[str], tmp_path: Path) -> None:
    import msgspec

    out = tmp_path / "report.json"
    done = interlock(
        *("bench", "run", *tiny, "--against", "engine.block_size=8", "--out", str(out)),
        *("--prompt-tokens", "40", "--output-tokens", "6", "--concurrency", "1,3"),
        *("--num-requests", "4", "--repeats", "2"),
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    assert [c["info"]["block_size"] for c in report.configurations] == [16, 8]
    assert report.rates["bytes_per_s"] > 0
    for result in report.loads:
        for item in result.configurations:
            assert item.summary.failed == 0
            assert item.floors is not None
            assert item.python_share is not None
            assert all(len(b.traces) == 4 for b in item.bursts)
            assert all(t.output_tokens == 6 for b in item.bursts for t in b.traces)
        assert len(result.configurations[1].gains["output_tps"]) == 2


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france() -> None:
    words = ["--model", "smollm2-135m", "--temperature", "0", "--max-tokens", "8"]
    done = interlock("generate", *words, "The capital of France is")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
