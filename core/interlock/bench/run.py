"""One benchmark from targets to report: sessions are opened, measured in turns, and closed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from interlock import __version__
from interlock.bench.compare import Contestant, Protocol, Say, idle_plugins, measure
from interlock.bench.floors import Floors, floors
from interlock.bench.machine import describe_machine
from interlock.bench.prompts import PromptSource
from interlock.bench.report import LoadResult, Report, measured
from interlock.bench.session import Session, WorkerSession, open_session
from interlock.bench.spec import Load, Target
from interlock.weights.config import ModelConfig

Opener = Callable[[Target], Session]


@attrs.frozen
class Job:
    """A benchmark to run: who is measured, under which loads, and how often."""

    targets: Sequence[Target]
    loads: Sequence[Load]
    protocol: Protocol
    model: ModelConfig | None = None
    """For the floors; without it none are computed."""


def run_job(job: Job, source: PromptSource, say: Say, opener: Opener | None = None) -> Report:
    """Measure everything and return the report; every session is closed, whatever happens."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with ExitStack() as stack:
        contestants = [_open(target, stack, say, opener or open_session) for target in job.targets]
        rates = _rates(contestants[0].session) if job.model else {}
        for load in job.loads:
            say(f"concurrency {load.concurrency}: {load.num_requests} requests per repeat")
            measure(contestants, load, source, job.protocol, say)
        results = [_result(contestants, job, i, rates) for i in range(len(job.loads))]
        return Report(
            version=__version__,
            machine=describe_machine(),
            started=started,
            configurations=[_configuration(c) for c in contestants],
            loads=results,
            rates=rates,
            problems=_problems(contestants, results),
        )


def _open(target: Target, stack: ExitStack, say: Say, opener: Opener) -> Contestant:
    say(f"starting {target.label}")
    session = opener(target)
    stack.callback(session.close)
    return Contestant(target, session)


def _rates(session: Session) -> dict[str, Any]:
    return session.probe() if isinstance(session, WorkerSession) else {}


def _result(
    contestants: Sequence[Contestant], job: Job, index: int, rates: dict[str, Any]
) -> LoadResult:
    load = job.loads[index]
    items = [measured(c, contestants[0], index) for c in contestants]
    for item, contestant in zip(items, contestants, strict=True):
        item.floors = _floors(contestant, job.model, load, rates)
    return LoadResult(load, items)


def _floors(
    contestant: Contestant, model: ModelConfig | None, load: Load, rates: dict[str, Any]
) -> Floors | None:
    info = contestant.session.info()
    if not model or not rates or not info.get("kv_bytes_per_token"):
        return None
    return floors(
        model,
        load,
        dtype=info["dtype"],
        kv_bytes_per_token=info["kv_bytes_per_token"],
        bytes_per_s=rates["bytes_per_s"],
        flops_per_s=rates["flops_per_s"],
    )


def _configuration(contestant: Contestant) -> dict[str, Any]:
    target = contestant.target
    return {
        "label": target.label,
        "kind": target.kind,
        "plugins": list(target.plugins),
        "flags": dict(target.flags),
        "sets": list(target.sets),
        "info": contestant.session.info(),
    }


def _problems(contestants: Sequence[Contestant], results: Sequence[LoadResult]) -> list[str]:
    """What makes numbers of this report doubtful: failed requests and plugins that did nothing."""
    found = []
    for result in results:
        for item in result.configurations:
            if item.summary.failed:
                reason = next(b.failed[0] for b in item.bursts if b.failed)
                found.append(
                    f"{item.label}: {item.summary.failed} requests failed at concurrency "
                    f"{result.load.concurrency}, for example: {reason}"
                )
    for contestant in contestants:
        label = contestant.target.label
        found += [f"{label}: no counter of plugin {p!r} moved" for p in idle_plugins(contestant)]
    return found
