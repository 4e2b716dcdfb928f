from __future__ import annotations

import pytest

from interlock.weights.resolve import resolve


@pytest.fixture(scope="session")
def smollm():
    """The default model's files, fetched into the user's cache on first use."""
    return resolve("smollm2-135m")
