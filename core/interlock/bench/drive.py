"""A closed loop straight on an engine: no HTTP, no queue of our own, one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from interlock.bench.metrics import Trace
from interlock.bench.spec import Load
from interlock.engine.outputs import Output
from interlock.engine.request import Request, SamplingParams

Clock = Callable[[], float]


class EngineLoop:
    """Keeps ``load.concurrency`` requests in flight and writes down when their tokens came."""

    def __init__(self, engine: Any, load: Load, clock: Clock = time.monotonic) -> None:
        self._engine = engine
        self._load = load
        self._clock = clock
        self._traces: dict[str, Trace] = {}
        self._in_flight: set[str] = set()

    def run(self, prompts: Sequence[Sequence[int]]) -> list[Trace]:
        """One trace per prompt, in order."""
        waiting = enumerate(prompts)
        self._fill(waiting)
        while self._in_flight:
            outputs = self._engine.step()
            now = self._clock()
            for output in outputs:
                self._note(output, now)
            self._fill(waiting)
        return list(self._traces.values())

    def _fill(self, waiting: Iterator[tuple[int, Sequence[int]]]) -> None:
        while len(self._in_flight) < self._load.concurrency:
            item = next(waiting, None)
            if item is None:
                return
            self._submit(f"bench-{item[0]}", item[1])

    def _submit(self, name: str, prompt: Sequence[int]) -> None:
        now = self._clock()
        self._traces[name] = Trace(now, [], now, len(prompt))
        self._engine.add(Request(name, list(prompt), params_of(self._load)))
        self._in_flight.add(name)

    def _note(self, output: Output, now: float) -> None:
        trace = self._traces[output.request_id]
        if output.token_ids:
            trace.arrivals.append((now, float(len(output.token_ids))))
        if output.finish_reason is not None:
            trace.end = now
            trace.error = output.error
            if output.finish_reason not in ("stop", "length"):
                trace.error = output.error or f"ended by {output.finish_reason}"
            self._in_flight.discard(output.request_id)


def params_of(load: Load) -> SamplingParams:
    return SamplingParams(
        max_tokens=load.output_tokens,
        temperature=load.temperature,
        ignore_eos=load.ignore_eos,
        seed=0 if load.temperature else None,
    )
