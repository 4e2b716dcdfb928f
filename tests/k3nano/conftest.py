from __future__ import annotations

import os
import random

import pytest

from k3nano.play import Player, solo

MODEL = os.environ.get("INTERLOCK_NANO", "k3-nano")
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 129, 200)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """One prompt of each length: exact multiples of the block size and of the chunks, ± 1."""
    rng = random.Random(3)
    return [[rng.randrange(256, 4096) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="session")
def oracle(prompts) -> list[list[int]]:
    """Each prompt's greedy continuation in float64, alone in the engine, one chunk, no plugin."""
    return solo(MODEL, prompts)


@pytest.fixture(scope="session")
def player() -> Player:
    return Player(MODEL)
