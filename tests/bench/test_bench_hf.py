"""The transformers target; needs the `oracle` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlock.bench.hf import TransformersRunner
from interlock.bench.spec import Load, Target
from interlock.errors import InterlockError

LOAD = Load(concurrency=2, num_requests=3, prompt_tokens=6, output_tokens=5)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: Any) -> TransformersRunner:
    pytest.importorskip("transformers")
    from tinymodels import write_tiny_hf

    folder = write_tiny_hf(tmp_path_factory.mktemp("hf") / "tiny")
    flags = {"engine.model": str(folder), "engine.dtype": "float32", "engine.threads": 1, "p.x": 1}
    return TransformersRunner(Target(kind="transformers", flags=flags))


def test_static_batches_give_exactly_the_lengths_asked_for(runner: TransformersRunner) -> None:
    traces = runner.run(LOAD, [[5, 6, 7, 8, 9, 10 + i] for i in range(3)])
    assert [(t.prompt_tokens, t.output_tokens, t.error) for t in traces] == [(6, 5, None)] * 3
    assert traces[0].arrivals == traces[1].arrivals
    assert traces[2].start >= traces[1].end


def test_info_names_versions_and_dtype(runner: TransformersRunner) -> None:
    info = runner.info()
    assert (info["dtype"], info["threads"]) == ("float32", 1)
    assert set(info["versions"]) == {"transformers", "torch"}


def test_outputs_that_may_end_early_are_refused(runner: TransformersRunner) -> None:
    with pytest.raises(InterlockError, match="static"):
        runner.run(Load(1, 1, 6, 5, ignore_eos=False), [[1] * 6])


def test_without_transformers_the_remedy_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InterlockError, match=r"interlock\[oracle\]"):
        TransformersRunner(Target(kind="transformers", flags={"engine.model": str(tmp_path)}))
