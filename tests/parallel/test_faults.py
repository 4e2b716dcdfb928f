"""A rank that dies or cannot load ends the whole engine, with its own error and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from interlock.errors import ConfigError, PluginError
from interlock.settings import EngineSettings, Settings
from parallel.ranks import PATIENCE_S, SCRIPT, arguments, environment, generate
from server.harness import ServerProcess, serving

LIMIT_S = 10.0


@pytest.fixture
def server(kimi) -> Iterator[ServerProcess]:
    with serving(
        kimi,
        real=True,
        engine__tp=3 - 1,
        engine__dtype="float32",
        engine__num_blocks=200,
        engine__max_model_len=1000,
        engine__threads=1,
    ) as running:
        yield running


def processes(server: ServerProcess) -> tuple[psutil.Process, psutil.Process]:
    """Rank 0 (the engine process) and rank 1, its child."""
    engine = server.engine()
    (worker,) = engine.children()
    return engine, worker


def streamed(server: ServerProcess, lines: list[str], started: threading.Event) -> None:
    body = {"prompt": "to", "max_tokens": 900, "stream": True, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            started.set()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_any_rank_during_a_request(server, victim, number):
    everyone = processes(server)
    lines: list[str] = []
    started = threading.Event()
    client = threading.Thread(target=streamed, args=(server, lines, started))
    client.start()
    assert started.wait(60)
    killed = time.monotonic()
    everyone[victim].send_signal(number)
    client.join(30)
    assert server.wait(20) != 0
    assert time.monotonic() - killed < LIMIT_S
    events = [line for line in lines if line.startswith("data: ")]
    assert "error" in json.loads(events[-1][6:])
    assert "[DONE]" not in lines[-1]
    _, alive = psutil.wait_procs(everyone, timeout=LIMIT_S)
    assert alive == []


@pytest.mark.parametrize("victim", [0, 1])
def test_killing_any_rank_while_nothing_runs(server, victim):
    everyone = processes(server)
    everyone[victim].kill()
    killed = time.monotonic()
    assert server.wait(20) != 0
    assert time.monotonic() - killed < LIMIT_S
    _, alive = psutil.wait_procs(everyone, timeout=LIMIT_S)
    assert alive == []
    if victim == 1:
        assert "rank 1 was killed by signal 9" in server.log


def test_a_stopped_server_leaves_no_rank(server):
    everyone = processes(server)
    assert server.stop() == 0
    _, alive = psutil.wait_procs(everyone, timeout=LIMIT_S)
    assert alive == []


def failing(kimi: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interlock", "generate", "--model", kimi, "--tp", "2", "a"]
    return subprocess.run(
        command,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


BROKEN = """
import os
from interlock.hookspec import hookimpl

class Plugin:
    api_version = 1

    @hookimpl
    def interlock_configure(self, settings):
        if os.environ.get("INTERLOCK_TP_RANK") == "1":
            {action}
"""


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ('raise RuntimeError("no room on this rank")', "rank 1 failed: .*no room on this rank"),
        ("os._exit(7)", "rank 1 ended with status 7"),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by signal 9"),
    ],
)
def test_a_rank_that_cannot_load_is_named_with_its_error(kimi, tmp_path, action, message):
    from plugins_for_tests import Site

    site = Site(tmp_path)
    site.add("broken", BROKEN.format(action=action))
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    done = failing(kimi, PYTHONPATH=path, INTERLOCK_PLUGINS="broken")
    assert done.returncode == 1
    import re

    assert re.search(f"interlock: error: .*{message}", done.stderr), done.stderr
    assert done.stdout == ""


def test_a_model_that_no_rank_can_load_gives_the_one_line_that_one_rank_gives(tmp_path):
    done = failing(str(tmp_path))
    assert done.returncode == 1
    assert "holds no model" in done.stderr.splitlines()[-1]


def test_heads_that_cannot_be_shared_are_one_line_and_start_no_process(kimi):
    command = [sys.executable, "-m", "interlock", "generate", "--model", kimi, "--tp", "3", "a"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("which 3 ranks cannot share evenly; use one of 1, 2, 4")


def test_plugins_handed_over_as_objects_are_refused(kimi):
    from interlock.engine.engine import Engine
    from interlock.plugins import Plugins
    from plugins_for_tests import Base

    settings = Settings(engine=EngineSettings(model=kimi, tp=2))
    with pytest.raises(ConfigError, match=r"engine\.tp: other ranks load plugins by name"):
        Engine(settings, plugins=Plugins.of({"mine": Base()}))


def test_a_plugin_that_replaces_the_runner_is_refused():
    from interlock.engine.engine import Engine
    from interlock.plugins import Plugins
    from sim import SimPlugin, SimRunner

    settings = Settings(engine=EngineSettings(tp=2))
    with pytest.raises((ConfigError, PluginError), match="'sim' replaces the runner"):
        Engine(settings, plugins=Plugins.of({"sim": SimPlugin(SimRunner())}))


SLOW_CLOCK = """
import os, time
from interlock.hookspec import hookimpl

if os.environ.get("INTERLOCK_TP_RANK") == "1":
    real = time.monotonic
    time.monotonic = lambda: real() + 3600.0

class Plugin:
    api_version = 1
    @hookimpl
    def interlock_configure(self, settings):
        pass
"""


def test_only_rank_0_has_a_clock(kimi, tmp_path, monkeypatch):
    """TPR-03: another rank's clock is an hour ahead, and nothing times out and nothing hangs."""
    from plugins_for_tests import Site

    Site(tmp_path).add("clock", SLOW_CLOCK)
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    script = SCRIPT.replace('LLM(given["model"]', 'LLM(given["model"], plugins=["clock"]')
    params = [{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}] * 6
    given = arguments(
        kimi, [[i + 3] * 9 for i in range(6)], params, tp=2, request_timeout_s=60, max_num_seqs=2
    )
    done = subprocess.run(
        [sys.executable, "-c", script, given],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens = json.loads(done.stdout.splitlines()[-1])["tokens"]
    assert tokens == generate(kimi, [[i + 3] * 9 for i in range(6)], params)["tokens"]
