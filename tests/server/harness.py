"""Starts real servers in processes of their own, on ports that the system chooses."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

TESTS = Path(__file__).resolve().parent.parent
CORE = TESTS.parent / "core"
PATIENCE_S = 60.0

LAUNCHER = """
import sys
from interlock.errors import InterlockError
from interlock.server.run import run_server
from interlock.settings import load_settings
kwargs = {}
if sys.argv[1] == "fake":
    kwargs = {"engine": "server.fake_engine:FakeEngine", "frontend": sys.argv[2]}
try:
    plugins = [name for name in sys.argv[3].split(",") if name]
    sys.exit(run_server(load_settings(plugins, None, {}, sys.argv[4:]), **kwargs))
except InterlockError as error:
    sys.exit(f"interlock: error: {error}")
"""


class ServerProcess:
    """A running server: its address, its process and what it wrote to stderr."""

    def __init__(self, arguments: list[str]) -> None:
        inherited = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(CORE), str(TESTS), inherited])
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line)
        self._queue.put(None)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def await_line(self, text: str) -> str:
        """The first line that contains ``text``; fails when the process ends without one."""
        end = time.monotonic() + PATIENCE_S
        while True:
            line = self._queue.get(timeout=max(0.1, end - time.monotonic()))
            if line is None:
                raise AssertionError(f"no line with {text!r} before the end:\n{self.log}")
            if text in line:
                return line

    def await_listening(self) -> None:
        line = self.await_line("listening on")
        self.url = line.split("listening on ")[1].split()[0]

    def engine(self) -> psutil.Process:
        """The engine process, the server's one child."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self, patience: float = PATIENCE_S) -> int:
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def serving(
    model: str = "fake",
    *,
    ready: bool = True,
    frontend: str = "server.fake_engine:load_frontend",
    real: bool = False,
    plugins: str = "",
    **sets: Any,
) -> Iterator[ServerProcess]:
    """A server with settings ``section__key=value``; stopped, and childless, afterwards."""
    values: Mapping[str, Any] = {"server__port": 0, "engine__model": model, **sets}
    arguments = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    server = ServerProcess(["real" if real else "fake", frontend, plugins, *arguments])
    children: list[psutil.Process] = []
    try:
        server.await_listening()
        if ready:
            server.await_line("ready:")
        children = psutil.Process(server.process.pid).children(recursive=True)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        server.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, f"orphans: {alive}"


def eventually(check: Any, *, within: float = 20.0) -> Any:
    """Poll ``check`` until it returns something true; the last value fails the test otherwise."""
    end = time.monotonic() + within
    while True:
        value = check()
        if value or time.monotonic() > end:
            assert value, "the condition was not met in time"
            return value
        time.sleep(0.05)


def gauge(client: httpx.Client, name: str, **labels: str) -> float:
    """Sum of the samples of ``name`` in /metrics whose labels include ``labels``."""
    from prometheus_client.parser import text_string_to_metric_families

    text = client.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
