"""Runs `interpreted_kernels.py` where Triton interprets kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreted import passed

FEWEST = 100


@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    assert passed(Path(__file__).with_name("interpreted_kernels.py")) >= FEWEST
