from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins_for_tests import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder for installed distributions, on this process's path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
