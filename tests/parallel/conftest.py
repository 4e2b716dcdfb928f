from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tinykimi import write_tiny_kimi
from tinymodels import write_tiny_hf


@pytest.fixture(scope="session")
def kimi(tmp_path_factory) -> str:
    return str(write_tiny_kimi(tmp_path_factory.mktemp("kimi") / "tiny-k3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    return str(write_tiny_hf(tmp_path_factory.mktemp("llama") / "tiny"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with the processes that it began with."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    children = psutil.Process().children(recursive=True)
    left = [process for process in children if process.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        process.kill()
    assert alive == []
