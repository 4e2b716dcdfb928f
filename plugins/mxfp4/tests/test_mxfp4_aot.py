"""The kernels compile for B300 without a GPU, and take what the committed table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlock_mxfp4.aot import Entry, cases, markdown

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "plugins/mxfp4/b300.json"
PAGE = ROOT / "docs/mxfp4-kernels.md"


def entries(path: Path) -> list[Entry]:
    rows = json.loads(path.read_text())["kernels"]
    return [Entry(**{**row, "tokens": tuple(row["tokens"])}) for row in rows]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """All cases, compiled now, in a process where Triton does not interpret."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("aot") / "table.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(path.parent / "cache")
    command = [sys.executable, "-W", "ignore", "-m", "interlock_mxfp4.aot", "--check", "--json"]
    done = subprocess.run(
        [*command, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.timeout(900)
def test_nothing_spills_and_block_scaled_products_have_their_instruction(compiled):
    found = entries(compiled)
    assert [problem for entry in found for problem in entry.problems()] == []
    scaled = [entry for entry in found if entry.block_scaled]
    assert {entry.kernel for entry in scaled} == {"gate_up_mx", "down_mx"}
    for entry in scaled:
        assert "tcgen05.mma" in entry.instruction
        assert "kind::mxf8f6f4.block_scale" in entry.instruction
    for name in ("gate_up", "down", "gate_up_mx", "down_mx"):
        covered = [t for entry in found if entry.kernel == name for t in entry.tokens]
        assert sorted(covered) == [1, 8, 16, 64, 128, 1024, 8192]


@pytest.mark.timeout(900)
def test_the_committed_table_is_what_this_compiler_makes(compiled):
    """Exactly, if the compiler is the one that made it; else the same cases and instructions."""
    fresh, kept = (json.loads(path.read_text()) for path in (compiled, TABLE))
    if fresh["triton"] == kept["triton"]:
        assert fresh == kept
    else:
        parts = ("kernel", "tokens", "tile", "warps")
        assert [[row[p] for p in parts] for row in fresh["kernels"]] == [
            [row[p] for p in parts] for row in kept["kernels"]
        ]


def test_the_page_shows_the_committed_table():
    assert markdown(entries(TABLE)) in PAGE.read_text()


def test_the_committed_table_has_every_case():
    assert [(e.kernel, e.tokens) for e in entries(TABLE)] == [
        (case.kernel.strip("_").removesuffix("_kernel"), case.tokens) for case in cases()
    ]


def test_problems_are_told():
    good = entries(TABLE)[0]
    import attrs

    bad = attrs.evolve(good, spill_stores=8, shared=10**6, block_scaled=True, instruction="mma")
    told = list(bad.problems())
    assert len(told) == 3
    assert list(good.problems()) == []


def test_interpreted_kernels_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "interlock_mxfp4.aot"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "aot: unset TRITON_INTERPRET: interpreted kernels are not compiled"
    )
