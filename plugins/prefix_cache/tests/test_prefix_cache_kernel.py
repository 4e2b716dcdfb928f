"""The kernel: in the interpreter, in a process of its own, and compiled for B300."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreted import passed

FEWEST = 18


@pytest.mark.timeout(600)
def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert passed(Path(__file__).with_name("interpreted_prefill.py")) >= FEWEST


@pytest.mark.timeout(600)
def test_the_kernel_compiles_for_b300_with_hardly_a_spill(tmp_path):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "interlock_prefix_cache.aot", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = {entry["block"]: entry for entry in json.loads(done.stdout)}
    assert entries[32]["spills"] <= 16
    assert entries[32]["shared"] <= 232_448
