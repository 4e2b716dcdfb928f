"""Measuring several configurations in turns, so that drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec

from interlock.bench.machine import OthersGauge
from interlock.bench.metrics import Burst, Trace
from interlock.bench.prompts import PromptSource
from interlock.bench.session import Session
from interlock.bench.spec import Load, Target

WARMUP_TOKENS = 8
NOISY_RETRIES = 3

Say = Callable[[str], None]


@attrs.define(slots=True)
class Contestant:
    """A target with its running session and everything measured so far, by load."""

    target: Target
    session: Session
    bursts: list[list[Burst]] = attrs.field(factory=list)


@attrs.frozen
class Protocol:
    """How often each load is run, and which repeats count."""

    repeats: int = 3
    warmup: int = 1
    max_others: float | None = None
    """Repeat a round in which other processes used more than this share of the CPUs."""


def turns(count: int, round_index: int) -> list[int]:
    """The order of ``count`` configurations in one round: A B, B A, B A, A B and so on.

    Every two rounds are mirrored, so that a linear drift cancels, and every pair of rounds begins
    with another configuration.
    """
    shift = round_index // 2 % count
    order = [(shift + i) % count for i in range(count)]
    return order[::-1] if round_index % 2 else order


def measure(
    contestants: Sequence[Contestant],
    load: Load,
    source: PromptSource,
    protocol: Protocol,
    say: Say,
) -> None:
    """Append one list of ``protocol.repeats`` bursts for ``load`` to every contestant."""
    _warm_up(contestants, load, source, protocol.warmup)
    rounds = [
        _quiet_round(contestants, load, source, protocol, index, say)
        for index in range(protocol.repeats)
    ]
    for number, contestant in enumerate(contestants):
        contestant.bursts.append([bursts[number] for bursts in rounds])


def _warm_up(
    contestants: Sequence[Contestant], load: Load, source: PromptSource, times: int
) -> None:
    short = msgspec.structs.replace(
        load,
        num_requests=load.concurrency,
        output_tokens=min(load.output_tokens, WARMUP_TOKENS),
    )
    for _ in range(times):
        for contestant in contestants:
            contestant.session.run(short, source.take(short.num_requests, short.prompt_tokens))


def _quiet_round(
    contestants: Sequence[Contestant],
    load: Load,
    source: PromptSource,
    protocol: Protocol,
    index: int,
    say: Say,
) -> dict[int, Burst]:
    for attempt in range(NOISY_RETRIES + 1):
        bursts = _round(contestants, load, source, index)
        others = max((b.others_cpu or 0.0 for b in bursts.values()), default=0.0)
        if protocol.max_others is None or others <= protocol.max_others:
            break
        more = "again" if attempt < NOISY_RETRIES else "kept, after several tries"
        say(f"repeat {index + 1}: other processes used {others:.0%} of the CPUs; {more}")
    return bursts


def _round(
    contestants: Sequence[Contestant], load: Load, source: PromptSource, index: int
) -> dict[int, Burst]:
    """Every contestant once, in turn, on the same prompts (new ones in every round)."""
    prompts = source.take(load.num_requests, load.prompt_tokens)
    return {
        number: _burst(contestants[number].session, load, prompts)
        for number in turns(len(contestants), index)
    }


def _burst(session: Session, load: Load, prompts: Sequence[Sequence[int]]) -> Burst:
    counters, totals = session.counters(), session.totals()
    gauge = OthersGauge(session.pids())
    traces = session.run(load, prompts)
    others = gauge.share()
    for trace, prompt in zip(traces, prompts, strict=True):
        check_lengths(trace, len(prompt), load)
    return Burst(
        traces=traces,
        others_cpu=others,
        counters=_moved(counters, session.counters()),
        engine=_difference(totals, session.totals()),
        resident_bytes=session.resident_bytes(),
    )


def check_lengths(trace: Trace, prompt_tokens: int, load: Load) -> None:
    """Mark a request as failed when it did not have exactly the lengths that were asked for."""
    if trace.error is not None:
        return
    if trace.prompt_tokens != prompt_tokens:
        trace.error = f"counted {trace.prompt_tokens} prompt tokens instead of {prompt_tokens}"
    elif load.ignore_eos and trace.output_tokens != load.output_tokens:
        trace.error = f"gave {trace.output_tokens} tokens instead of {load.output_tokens}"


def _moved(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    return {name: _difference(before.get(name, {}), now) for name, now in after.items()}


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    return {k: v if k.endswith("_now") else v - before.get(k, 0) for k, v in after.items()}


def idle_plugins(contestant: Contestant) -> list[str]:
    """Enabled plugins none of whose counters moved in any repeat (design, rule 14)."""
    names = [report["name"] for report in contestant.session.info().get("plugins", [])]
    bursts = [burst for bursts in contestant.bursts for burst in bursts]
    return [name for name in names if not any(_moving(b.counters.get(name, {})) for b in bursts)]


def _moving(counters: dict[str, float]) -> bool:
    return any(value for name, value in counters.items() if not name.endswith("_now"))
