"""The subprocess of a configuration: its protocol, its failures and its end."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from interlock.bench import worker
from interlock.bench.metrics import Trace
from interlock.bench.session import Failed, FromWorker, Run, Start, Status, WorkerSession, write
from interlock.bench.spec import Load, Target
from interlock.errors import ConfigError, InterlockError

LOAD = Load(1, 2, 3, 4)

ECHO = """
import os, sys, msgspec
from interlock.bench.session import *
from interlock.bench.metrics import Trace
decode = msgspec.json.Decoder(ToWorker).decode
for line in sys.stdin.buffer:
    message = decode(line)
    if isinstance(message, Start):
        answer = Status(info={"label": message.target.label, "pid": os.getpid()})
    elif isinstance(message, Run):
        answer = Status(traces=[Trace(0.0, [(1.0, 4.0)], 1.0, len(p)) for p in message.prompts])
    else:
        answer = Probed({"bytes_per_s": 1.0})
    write(sys.stdout.buffer, answer)
"""


def session(code: str, label: str = "x") -> WorkerSession:
    return WorkerSession(Target(label=label), [sys.executable, "-c", code])


@pytest.fixture
def echo() -> Iterator[WorkerSession]:
    opened = session(ECHO, "echo")
    yield opened
    opened.close()


def test_a_session_starts_runs_and_probes(echo: WorkerSession) -> None:
    assert echo.info() == {"label": "echo", "pid": echo.pids()[0]}
    assert [t.prompt_tokens for t in echo.run(LOAD, [[1, 2, 3], [1]])] == [3, 1]
    assert echo.probe() == {"bytes_per_s": 1.0}


def test_closing_ends_the_subprocess(echo: WorkerSession) -> None:
    pid = echo.pids()[0]
    echo.close()
    assert not psutil.pid_exists(pid)


def test_a_worker_that_dies_is_an_error_with_its_status() -> None:
    with pytest.raises(InterlockError, match="x: the benchmark's worker ended with status 7"):
        session("import sys; sys.stdin.readline(); sys.exit(7)")


def test_a_failure_in_the_worker_arrives_with_the_label() -> None:
    code = "import sys\nfrom interlock.bench.session import *\nsys.stdin.readline()\n"
    with pytest.raises(InterlockError, match=r"^b: no model"):
        session(code + "write(sys.stdout.buffer, Failed('no model'))", "b")


class Runner:
    """Stands for an engine inside the worker."""

    def __init__(self, _: Target) -> None:
        self.runs = 0

    def info(self) -> dict[str, Any]:
        return {"dtype": "float32"}

    def counters(self) -> dict[str, dict[str, float]]:
        return {"p": {"runs_total": float(self.runs)}}

    def totals(self) -> dict[str, float]:
        return {}

    def run(self, _: Load, prompts: list[list[int]]) -> list[Trace]:
        self.runs += 1
        if not prompts:
            raise ValueError("no prompts")
        return [Trace(0.0, [(1.0, 1.0)], 1.0, len(p)) for p in prompts]


def converse(*messages: Any) -> list[Any]:
    requests, answers = io.BytesIO(), io.BytesIO()
    for message in messages:
        write(requests, message)
    requests.seek(0)
    worker.main(requests, answers)
    decode = msgspec.json.Decoder(FromWorker).decode
    return [decode(line) for line in answers.getvalue().splitlines()]


def test_worker_answers_each_message_and_survives_a_failure(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker, "make_runner", Runner)
    answers = converse(Start(Target()), Run(LOAD, []), Run(LOAD, [[1, 2]]))
    assert isinstance(answers[0], Status)
    assert answers[0].counters == {"p": {"runs_total": 0.0}}
    assert isinstance(answers[1], Failed)
    assert answers[1].message == "ValueError: no prompts"
    assert isinstance(answers[2], Status)
    assert answers[2].traces[0].prompt_tokens == 2


def test_worker_reports_a_wrong_configuration_as_one_line(monkeypatch: Any) -> None:
    def refuse(_: Target) -> None:
        raise ConfigError("engine.dtype: no such thing")

    monkeypatch.setattr(worker, "make_runner", refuse)
    assert converse(Start(Target())) == [Failed("engine.dtype: no such thing")]


def test_an_unknown_setting_is_reported_before_the_model_is_loaded() -> None:
    (answer,) = converse(Start(Target(plugins=(), sets=("engine.dtyp=float32",))))
    assert isinstance(answer, Failed)
    assert "did you mean engine.dtype" in answer.message


def test_prints_of_libraries_do_not_reach_the_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOISY],
        input=msgspec.json.encode(Start(Target(plugins=()))) + b"\n",
        capture_output=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert msgspec.json.decode(line, type=FromWorker) == Failed("stop here")
    assert b"noise from the engine" in done.stderr


NOISY = """
import runpy, sys, types
import interlock.settings, interlock.errors

def load(*_):
    print("noise from the engine", flush=True)
    raise interlock.errors.ConfigError("stop here")

interlock.settings.load_settings = load
sys.modules["interlock.engine.engine"] = types.SimpleNamespace(Engine=None)
runpy.run_module("interlock.bench.worker", run_name="__main__")
"""
