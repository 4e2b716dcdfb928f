"""Asking the KV sources in turn what a request need not compute."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.cache.blocks import blocks_for
from interlock.engine.request import Request
from interlock.extension import KVSource, Match


def chain(sources: Sequence[KVSource], request: Request, block_size: int) -> list[Match]:
    """A match for each source, in order, each asked with the tokens reached so far. Pure.

    The newest token is always computed, since its logits are wanted; so is the whole prompt when
    its log-probabilities are.
    """
    found: list[Match] = []
    reached, most = 0, request.num_tokens - 1
    for source in sources:
        match = None if request.wants_prompt_logprobs else source.match(request, reached)
        found.append(_trim(match or Match(0), reached, most - reached, block_size))
        reached += found[-1].num_tokens
    return found


def _trim(match: Match, reached: int, most: int, block_size: int) -> Match:
    if match.num_tokens <= 0 or most <= 0 or (match.blocks and reached % block_size):
        return Match(0)
    tokens = min(match.num_tokens, most)
    return Match(tokens, match.blocks[: blocks_for(tokens, block_size)])
