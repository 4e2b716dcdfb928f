"""Runs `interpreted_kernels.py` where Triton interprets kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("interpreted_kernels.py")
FEWEST = 60


@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FILE), "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-W", "ignore"], env=environment, capture_output=True, text=True, check=False,
        cwd=FILE.parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= FEWEST
    assert "skipped" not in done.stdout
