"""How well a configuration predicts held-out text: what a lossy optimization costs.

The text is cut into windows of so many tokens, each a sequence of its own; the model says how
likely it found every token but the first. Bits per byte compare models with different tokenizers,
perplexity is per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from interlock.bench.session import WorkerSession
from interlock.bench.spec import Target
from interlock.errors import ConfigError


class Quality(msgspec.Struct):
    """One configuration's figures over all windows."""

    label: str
    tokens: int
    bytes: int
    nats: float
    """Summed negative log-likelihood."""
    worse: list[float] = []
    """Nats of each window over the first configuration's."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def windows(ids: Sequence[int], size: int, count: int) -> list[list[int]]:
    """Up to ``count`` windows of ``size`` tokens, spread evenly over the text without overlap."""
    whole = len(ids) // size
    if not whole:
        raise ConfigError(
            f"bench perplexity: the text has {len(ids)} tokens, a window {size}; give a longer "
            "--text or a smaller --window"
        )
    chosen = sorted({index * whole // min(count, whole) for index in range(min(count, whole))})
    return [list(ids[index * size : (index + 1) * size]) for index in chosen]


def measure(target: Target, parts: list[list[int]]) -> list[float]:
    """Negative log-likelihood in nats of each window, by an engine in a subprocess."""
    session = WorkerSession(target)
    try:
        return session.score(parts)
    finally:
        session.close()


def qualities(targets: Sequence[Target], parts: list[list[int]], tokenizer: Any) -> list[Quality]:
    """Figures of every configuration, in turn, over the same windows."""
    if any(target.kind != "engine" for target in targets):
        raise ConfigError("bench perplexity: only interlock's own configurations can be compared")
    size = sum(len(tokenizer.decode(part[1:]).encode()) for part in parts)
    tokens = sum(len(part) - 1 for part in parts)
    found: list[Quality] = []
    first: list[float] = []
    for target in targets:
        nats = measure(target, parts)
        first = first or nats
        worse = [mine / base for mine, base in zip(nats, first, strict=True)]
        found.append(Quality(target.label, tokens, size, sum(nats), worse))
    return found
