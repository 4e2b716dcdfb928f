"""The subprocess of one configuration: reads requests on stdin, answers on stdout, as JSON lines.

Anything that a library prints goes to stderr, so that the answers stay readable.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any

import msgspec
import psutil

from interlock.bench.drive import EngineLoop
from interlock.bench.metrics import Trace
from interlock.bench.session import (
    Failed,
    FromWorker,
    Probe,
    Probed,
    Run,
    Score,
    Scored,
    Start,
    Status,
    ToWorker,
    write,
)
from interlock.bench.spec import Load, Target
from interlock.errors import InterlockError


class EngineRunner:
    """An interlock engine under measurement."""

    def __init__(self, target: Target) -> None:
        from interlock.engine.engine import Engine
        from interlock.settings import describe, load_settings

        settings = load_settings(target.plugins, None, target.flags, target.sets)
        self._engine = Engine(settings)
        self._settings = describe(settings)

    def info(self) -> dict[str, Any]:
        import torch

        described: dict[str, Any] = msgspec.to_builtins(self._engine.info)
        described["plugins"] = msgspec.to_builtins(self._engine.plugin_report())
        described["versions"] = {"torch": str(torch.__version__)}
        described["threads"] = torch.get_num_threads()
        described["settings"] = msgspec.to_builtins(_changed(self._settings), enc_hook=str)
        return described

    def counters(self) -> dict[str, dict[str, float]]:
        return {report.name: dict(report.counters) for report in self._engine.plugin_report()}

    def totals(self) -> dict[str, float]:
        stats: dict[str, Any] = msgspec.to_builtins(self._engine.stats())
        return {k: v for k, v in stats.items() if k.endswith("_total")}

    def score(self, prompts: list[list[int]]) -> list[float]:
        return score(self._engine, prompts)

    def run(self, load: Load, prompts: list[list[int]]) -> list[Trace]:
        return EngineLoop(self._engine, load).run(prompts)


def score(engine: Any, prompts: list[list[int]]) -> list[float]:
    """Negative log-likelihood of each sequence, one after another."""
    from interlock.engine.request import Request, SamplingParams

    nats = []
    for index, ids in enumerate(prompts):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        engine.add(Request(f"score-{index}", ids, params))
        outputs: list[Any] = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += engine.step()
        if outputs[-1].error:
            raise InterlockError(outputs[-1].error)
        nats.append(-sum(each.logprob for each in outputs[-1].prompt_logprobs[1:]))
    return nats


def _changed(settings: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The settings that are not at their default."""
    return {
        f"{section}.{name}": field["value"]
        for section, fields in settings.items()
        for name, field in fields.items()
        if field["source"] != "default"
    }


def make_runner(target: Target) -> Any:
    if target.kind == "transformers":
        from interlock.bench.hf import TransformersRunner

        return TransformersRunner(target)
    return EngineRunner(target)


def probe(runner: Any) -> Probed:
    """The CPU's floors; for other devices there are none, and the report leaves them out."""
    info = runner.info()
    if info.get("device") != "cpu":
        return Probed()
    from interlock.bench.floors import probe_machine

    return Probed(probe_machine(info["dtype"]))


class Worker:
    """Answers one message after another; a failure is an answer too."""

    def __init__(self) -> None:
        self._runner: Any = None

    def answer(self, message: ToWorker) -> FromWorker:
        try:
            return self._answer(message)
        except InterlockError as error:
            return Failed(str(error))
        except Exception as error:
            return Failed(f"{type(error).__name__}: {error}")

    def _answer(self, message: ToWorker) -> FromWorker:
        if isinstance(message, Start):
            self._runner = make_runner(message.target)
            return self._status([])
        if isinstance(message, Run):
            return self._status(self._runner.run(message.load, message.prompts))
        if isinstance(message, Score):
            return Scored(self._runner.score(message.prompts))
        assert isinstance(message, Probe)
        return probe(self._runner)

    def _status(self, traces: list[Trace]) -> Status:
        runner = self._runner
        resident = psutil.Process().memory_info().rss
        return Status(runner.info(), runner.counters(), runner.totals(), traces, resident)


def main(requests: IO[bytes], answers: IO[bytes]) -> None:
    decoder = msgspec.json.Decoder(ToWorker)
    worker = Worker()
    for line in requests:
        write(answers, worker.answer(decoder.decode(line)))


if __name__ == "__main__":
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(sys.stdin.buffer, private)
