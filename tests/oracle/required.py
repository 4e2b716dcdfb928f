"""Oracles that are installed in environments of their own."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def oracle(module: str) -> Any:
    """The module, or a skip; where tox has installed it, its absence is a failure."""
    try:
        return importlib.import_module(module)
    except ImportError:
        if module.partition(".")[0] in os.environ.get("INTERLOCK_ORACLES", "").split(","):
            raise
        reason = f"{module} is not installed; tox -e oracle and oracle-kda have it"
        pytest.skip(reason, allow_module_level=True)
