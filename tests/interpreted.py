"""Runs a file of tests where Triton interprets kernels: decided when Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def passed(file: Path) -> int:
    """How many tests of ``file`` passed; fails with its output if one failed or was skipped."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-W", "ignore"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    return int(found[1])
