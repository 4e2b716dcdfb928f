"""Asking the drafter, without letting it harm anybody."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.engine.request import Request
from interlock.extension import Drafter


def propose(
    drafter: Drafter, requests: Sequence[Request], vocab_size: int
) -> list[list[int] | Exception]:
    """Draft tokens for each request, or the exception that its own proposal raised.

    A proposal for all that fails is asked for again one by one, so that only the culprit ends.
    """
    if not requests:
        return []
    try:
        answers = [list(drafts) for drafts in drafter.propose(requests)]
        if len(answers) != len(requests):
            raise ValueError(f"{len(answers)} proposals for {len(requests)} requests")
        for drafts in answers:
            _check(drafts, vocab_size)
    except Exception as error:
        if len(requests) == 1:
            return [error]
        return [propose(drafter, [request], vocab_size)[0] for request in requests]
    return [*answers]


def _check(drafts: list[int], vocab_size: int) -> None:
    for token in drafts:
        if not 0 <= token < vocab_size:
            raise ValueError(f"draft token {token} is out of vocabulary (0 to {vocab_size - 1})")
