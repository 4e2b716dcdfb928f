"""Stand-ins for what the load generator drives: an engine, a session, a clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from interlock.bench.metrics import Trace
from interlock.bench.spec import Load
from interlock.engine.outputs import Output
from interlock.engine.request import Request


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Gives every running request ``per_step`` tokens in each step of one second."""

    def __init__(self, clock: Clock, per_step: int = 1) -> None:
        self.clock = clock
        self.per_step = per_step
        self.running: dict[str, tuple[Request, int]] = {}
        self.most_running = 0
        self.fail: set[str] = set()

    def add(self, request: Request) -> None:
        self.running[request.id] = (request, 0)
        self.most_running = max(self.most_running, len(self.running))

    def step(self) -> list[Output]:
        self.clock.now += 1.0
        return [self._advance(request, done) for request, done in list(self.running.values())]

    def _advance(self, request: Request, done: int) -> Output:
        if request.id in self.fail:
            del self.running[request.id]
            return Output(request.id, finish_reason="error", error="row failed")
        limit = request.params.max_tokens or 0
        fresh = min(self.per_step, limit - done)
        self.running[request.id] = (request, done + fresh)
        reason = "length" if done + fresh == limit else None
        if reason:
            del self.running[request.id]
        return Output(request.id, token_ids=[7] * fresh, finish_reason=reason)


class FakeSession:
    """Answers every request with one token per ``seconds``, and counts what it was asked."""

    def __init__(self, seconds: float, plugins: Sequence[str] = (), moving: bool = True) -> None:
        self.seconds = seconds
        self.plugins = plugins
        self.moving = moving
        self.calls: list[tuple[Load, list[list[int]]]] = []
        self.closed = False
        self.log: list[Any] = []

    def info(self) -> dict[str, Any]:
        return {"plugins": [{"name": name} for name in self.plugins]}

    def pids(self) -> list[int]:
        return []

    def counters(self) -> dict[str, dict[str, float]]:
        count = float(len(self.calls)) if self.moving else 0.0
        return {name: {"calls_total": count} for name in self.plugins}

    def resident_bytes(self) -> int:
        return 5 << 20

    def totals(self) -> dict[str, float]:
        return {"plan_seconds_total": 1.0 * len(self.calls), "forward_seconds_total": 3.0}

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[Trace]:
        self.calls.append((load, [list(p) for p in prompts]))
        self.log.append(self)
        return [self._trace(load, len(p)) for p in prompts]

    def _trace(self, load: Load, prompt_tokens: int) -> Trace:
        arrivals = [(self.seconds * (i + 1), 1.0) for i in range(load.output_tokens)]
        return Trace(0.0, arrivals, arrivals[-1][0], prompt_tokens)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> FakeEngine:
    return FakeEngine(clock)


@pytest.fixture
def fake_session() -> type[FakeSession]:
    return FakeSession
