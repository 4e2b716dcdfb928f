"""One subprocess per configuration, so that each starts fresh and none disturbs another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, Protocol

import msgspec

from interlock.bench.metrics import Trace
from interlock.bench.spec import Load, Target
from interlock.errors import InterlockError

CLOSE_TIMEOUT_S = 20.0


class Session(Protocol):
    """A configuration that is ready to be measured."""

    def info(self) -> dict[str, Any]: ...
    def pids(self) -> list[int]: ...
    def counters(self) -> dict[str, dict[str, float]]: ...
    def totals(self) -> dict[str, float]: ...
    def resident_bytes(self) -> int: ...
    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[Trace]: ...
    def close(self) -> None: ...


class Start(msgspec.Struct, tag=True):
    target: Target


class Run(msgspec.Struct, tag=True):
    load: Load
    prompts: list[list[int]]


class Probe(msgspec.Struct, tag=True):
    """Measure the machine's floors for the engine's dtype."""


class Score(msgspec.Struct, tag=True):
    """Compute how likely the tokens of these sequences are."""

    prompts: list[list[int]]


class Scored(msgspec.Struct, tag=True):
    nats: list[float]
    """Negative log-likelihood of each sequence without its first token."""


class Status(msgspec.Struct, tag=True):
    """What a worker is and has counted; its answer to `Start` and `Run`."""

    info: dict[str, Any] = {}
    counters: dict[str, dict[str, float]] = {}
    totals: dict[str, float] = {}
    traces: list[Trace] = []
    resident_bytes: int = 0
    """Memory of the worker's process that is in RAM."""


class Probed(msgspec.Struct, tag=True):
    floors: dict[str, Any] = {}


class Failed(msgspec.Struct, tag=True):
    message: str


ToWorker = Start | Run | Probe | Score
FromWorker = Status | Probed | Scored | Failed


class WorkerSession:
    """A subprocess that holds an engine (or transformers) and answers over its pipes."""

    def __init__(self, target: Target, command: Sequence[str] | None = None) -> None:
        self._label = target.label
        self._decoder = msgspec.json.Decoder(FromWorker)
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            list(command or (sys.executable, "-m", "interlock.bench.worker")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C must reach only us: the worker goes when its input is closed.
            start_new_session=True,
            env={**os.environ, "TQDM_DISABLE": "1"},
        )
        try:
            self._status = self._ask_status(Start(target))
        except BaseException:
            self.close()
            raise

    def info(self) -> dict[str, Any]:
        return self._status.info

    def pids(self) -> list[int]:
        return [self._process.pid]

    def counters(self) -> dict[str, dict[str, float]]:
        return self._status.counters

    def totals(self) -> dict[str, float]:
        return self._status.totals

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[Trace]:
        self._status = self._ask_status(Run(load, [list(p) for p in prompts]))
        return self._status.traces

    def resident_bytes(self) -> int:
        return self._status.resident_bytes

    def score(self, prompts: list[list[int]]) -> list[float]:
        """Negative log-likelihood in nats of every sequence, given its first token."""
        answer = self._ask(Score(prompts))
        if not isinstance(answer, Scored):
            raise InterlockError(f"{self._label}: the worker answered out of turn")
        return answer.nats

    def probe(self) -> dict[str, Any]:
        """Measured floors of this machine, by `interlock.ops.cpu_probe`."""
        answer = self._ask(Probe())
        return answer.floors if isinstance(answer, Probed) else {}

    def close(self) -> None:
        """End the subprocess: by closing its input, and by force if it does not go."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_TIMEOUT_S if self._idle() else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _idle(self) -> bool:
        return not getattr(self, "_asking", False)

    def _ask_status(self, message: ToWorker) -> Status:
        answer = self._ask(message)
        if not isinstance(answer, Status):
            raise InterlockError(f"{self._label}: the worker answered out of turn")
        return answer

    def _ask(self, message: ToWorker) -> FromWorker:
        self._asking = True
        try:
            write(_pipe(self._process.stdin), message)
            line = _pipe(self._process.stdout).readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            raise InterlockError(f"{self._label}: the benchmark's worker ended with status {code}")
        self._asking = False
        answer = self._decoder.decode(line)
        if isinstance(answer, Failed):
            raise InterlockError(f"{self._label}: {answer.message}")
        return answer


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # Popen was called with PIPE
    return stream


def write(stream: IO[bytes], message: Any) -> None:
    """Send one message: JSON on a line of its own."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def open_session(target: Target) -> Session:
    """Start (or connect to) a target; raises InterlockError when it cannot be used."""
    if target.kind == "url":
        from interlock.bench.http_target import UrlSession

        return UrlSession(target)
    return WorkerSession(target)
