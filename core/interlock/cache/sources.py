"""Asking the KV sources in turn what a request need not compute."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from interlock.cache.blocks import blocks_for
from interlock.engine.request import Request
from interlock.errors import PluginError
from interlock.extension import KVSource, Match


@attrs.frozen
class Share:
    """What one source supplies: tokens ``start`` to ``stop``."""

    plugin: str
    source: KVSource
    start: int
    match: Match

    @property
    def stop(self) -> int:
        return self.start + self.match.num_tokens


def chain(
    sources: Sequence[tuple[str, KVSource]],
    request: Request,
    block_size: int,
    *,
    stateful: bool = False,
) -> list[Share]:
    """One share for each source, in order, each beginning where the one before it ends. Pure.

    The newest token is always computed, since its logits are wanted; so is the whole prompt when
    its log-probabilities are. A source is always asked from the beginning of a block: if it has
    more than the partly filled block that the previous one ends with, that block is left out.
    ``stateful``: blocks have to come with the recurrent state at their end.
    """
    shares: list[Share] = []
    stop = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
    for plugin, source in sources:
        reached = shares[-1].stop if shares else 0
        tail = reached % block_size
        share = _ask(plugin, source, request, reached - tail, stop, block_size)
        if tail and share.match.num_tokens > tail:
            shorter = _without_tail(shares, request, reached - tail, block_size)
            if shorter is not None:
                shares = [*shorter, share]
                continue
        if tail or not share.match.num_tokens:
            share = Share(plugin, source, reached, Match(0))
        shares.append(share)
    if stateful:
        _check_states(shares)
    return shares


def _check_states(shares: Sequence[Share]) -> None:
    for share in shares:
        if share.match.blocks and share.match.num_tokens and share.match.state is None:
            raise PluginError(
                f"plugin {share.plugin!r}: {share.match.num_tokens} tokens come without the "
                "recurrent state that this model continues from"
            )


def state(shares: Sequence[Share]) -> int | None:
    """The slot whose state the request continues from; None if it starts or is filled anew."""
    last = [share.match.state for share in shares if share.match.num_tokens]
    return last[-1] if last else None


def nothing(shares: Sequence[Share]) -> list[Share]:
    """The same sources, supplying no token."""
    return [Share(share.plugin, share.source, 0, Match(0)) for share in shares]


def table(shares: Sequence[Share], block_size: int) -> list[int | None]:
    """The block table that the shares begin; None where the core has to allocate a block."""
    blocks: list[int | None] = []
    for share in shares:
        count = blocks_for(share.stop, block_size) - len(blocks)
        blocks += share.match.blocks or [None] * count
    return blocks


def _ask(
    plugin: str, source: KVSource, request: Request, start: int, stop: int, block_size: int
) -> Share:
    if start >= stop:
        return Share(plugin, source, start, Match(0))
    match = source.match(request, start, stop) or Match(0)
    wanted = blocks_for(match.num_tokens, block_size)
    if not 0 <= match.num_tokens <= stop - start or len(match.blocks) not in (0, wanted):
        raise PluginError(
            f"plugin {plugin!r}: match({start}, {stop}) answered {match.num_tokens} tokens in "
            f"{len(match.blocks)} blocks"
        )
    return Share(plugin, source, start, match)


def _without_tail(
    shares: Sequence[Share], request: Request, stop: int, block_size: int
) -> list[Share] | None:
    """The shares again, the last one that is not empty ending at ``stop``; None if it cannot."""
    last = max(i for i, share in enumerate(shares) if share.match.num_tokens)
    old = shares[last]
    new = _ask(old.plugin, old.source, request, old.start, stop, block_size)
    if new.stop != stop:
        return None
    later = [Share(share.plugin, share.source, stop, Match(0)) for share in shares[last + 1 :]]
    return [*shares[:last], new, *later]
