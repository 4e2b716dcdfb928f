"""Start, readiness, death and stop of the processes (reports CLI-02, CLI-04, MET-06, STR-10)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from interlock.server.run import StartError, bind
from server.harness import CORE, LAUNCHER, PATIENCE_S, ServerProcess, eventually, gauge, serving

FRONTEND = "server.fake_engine:load_frontend"
TEXT = "/v1/completions"
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def failing(*sets, frontend=FRONTEND):
    server = ServerProcess(["fake", frontend, "", "server.port=0", *sets])
    return server.wait(), server.log


def test_a_terminal_sees_no_advice_that_is_not_ours():
    ours, terminal = os.openpty()
    arguments = ["fake", FRONTEND, "", "server.port=0", "engine.model=fake"]
    path = os.pathsep.join([str(CORE), str(CORE.parent / "tests")])
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = [process.stderr.readline()]
        while "ready:" not in lines[-1] and lines[-1]:
            lines.append(process.stderr.readline())
        process.terminate()
    os.close(terminal)
    os.close(ours)
    assert "ready:" in lines[-1]
    assert all(line.startswith("interlock: ") for line in lines)


def client_of(server):
    return httpx.Client(base_url=server.url, timeout=PATIENCE_S)


def test_a_busy_port_is_found_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, log = failing(f"server.port={port}", "engine.model=fake-slow-load")
    assert status == 1
    assert f"port {port}" in log
    assert "loading" not in log
    assert "Traceback" not in log


def test_a_port_without_permission_is_named(monkeypatch):
    class Locked(socket.socket):
        def bind(self, address):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket", Locked)
    with pytest.raises(StartError, match="port 80: Permission denied; choose another"):
        bind("127.0.0.1", 80)


def test_a_host_that_is_not_ours_is_named():
    status, log = failing("server.host=192.0.2.1")
    assert status == 1
    assert "192.0.2.1" in log
    assert "choose another with --host" in log


def test_more_http_processes_than_built_are_refused():
    status, log = failing("server.http_workers=2")
    assert status == 1
    assert "http_workers" in log


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("fake-missing", "no such model"),
        ("fake-broken", "the file is cut short"),
        ("fake-dies-loading", "signal 9"),
    ],
)
def test_a_failed_start_is_one_line(model, reason):
    status, log = failing(f"engine.model={model}")
    assert status == 1
    last = log.splitlines()[-1]
    assert last.startswith("interlock: error: ")
    assert reason in last
    assert "Traceback" not in log


def test_while_loading_it_lives_but_is_not_ready():
    with serving("fake-slow-load", ready=False) as server, client_of(server) as http:
        assert http.get("/health").status_code == 200
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["ready"] is False
        answer = http.post(TEXT, json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_loading"
        assert "retry-after" in answer.headers
        assert http.get("/v1/models").json()["data"] == []


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("model", "frontend"),
    [("fake-slow-load", FRONTEND), ("fake", "server.fake_engine:slow_frontend")],
)
def test_a_signal_while_loading_ends_cleanly(number, model, frontend):
    with serving(model, ready=False, frontend=frontend) as server:
        engine = eventually(lambda: psutil.Process(server.process.pid).children())[0]
        assert server.stop(number) == 0
        psutil.wait_procs([engine], timeout=20)
        assert not engine.is_running()
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_when_idle_ends_cleanly(number):
    with serving() as server:
        assert server.stop(number) == 0
        assert "Traceback" not in server.log


def test_running_requests_finish_after_sigterm():
    with serving() as server, client_of(server) as http, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "!slow 0.05 !say finished in time", "max_tokens": 50}
        whole = pool.submit(http.post, TEXT, json=body)
        streamed = pool.submit(http.post, TEXT, json={**body, "stream": True})
        eventually(lambda: gauge(http, "interlock_num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: http.get("/ready").status_code == 503)
        refused = http.post(TEXT, json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert whole.result().json()["choices"][0]["text"] == "finished in time"
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert server.wait() == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_streams_over_the_limit_end_with_an_error_event(number):
    with (
        serving(server__shutdown_timeout_s=0.5) as server,
        client_of(server) as http,
        ThreadPoolExecutor(21) as pool,
    ):
        body = {"prompt": "!slow 0.02 x", "max_tokens": 500}
        streams = [pool.submit(http.post, TEXT, json={**body, "stream": True}) for _ in range(20)]
        whole = pool.submit(http.post, TEXT, json=body)
        eventually(lambda: gauge(http, "interlock_num_requests_running") == 21)
        server.process.send_signal(number)
        for stream in streams:
            lines = [line for line in stream.result().text.split("\n") if line]
            assert json.loads(lines[-1][6:])["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert server.wait() == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_at_once(number):
    with serving() as server, client_of(server) as http:
        engine = server.engine()
        body = {"prompt": "!stall 30 x", "max_tokens": 500}
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(http.post, TEXT, json=body)
            eventually(lambda: gauge(http, "interlock_http_requests_active") >= 2)
            server.process.send_signal(number)
            server.await_line("stopping")
            assert server.stop(number) == 128 + number
            with pytest.raises(httpx.HTTPError):
                pending.result()
        psutil.wait_procs([engine], timeout=20)
        assert not engine.is_running()


def test_killing_the_engine_makes_health_503_and_requests_fail_fast():
    with serving() as server, client_of(server) as http, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "!slow 0.05 x", "max_tokens": 500}
        stream = pool.submit(http.post, TEXT, json={**body, "stream": True})
        whole = pool.submit(http.post, TEXT, json=body)
        eventually(lambda: gauge(http, "interlock_num_requests_running") == 2)
        server.engine().kill()
        eventually(lambda: http.get("/health").status_code == 503)
        assert "signal 9" in http.get("/health").json()["reason"]
        assert http.get("/ready").status_code == 503
        assert json.loads(stream.result().text.split("data: ")[-1])["error"]["code"] == (
            "engine_dead"
        )
        assert whole.result().status_code == 503
        for path, sent in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            answer = http.post(path, json=sent)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
        assert gauge(http, "interlock_num_requests_running") == 0
        assert gauge(http, "interlock_engine_ready") == 0
        # It does not wait for anybody to notice: whoever supervises it starts it anew.
        assert server.wait(20) == 1


def test_the_engine_may_die_in_the_middle_of_a_step():
    with serving() as server, client_of(server) as http:
        answer = http.post(TEXT, json={"prompt": "!die"})
        assert answer.status_code == 503
        assert http.get("/health").status_code == 503


def test_an_engine_that_hangs_is_not_ready_but_may_recover():
    with (
        serving(server__stall_timeout_s=1) as server,
        client_of(server) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        hung = pool.submit(http.post, TEXT, json={"prompt": "!stall 4 !say back"})
        eventually(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").status_code == 200
        assert "stuck" in http.get("/ready").json()["reason"]
        answer = http.post(TEXT, json={"prompt": "a"})
        assert answer.json()["error"]["code"] == "engine_stuck"
        assert hung.result().json()["choices"][0]["text"] == "back"
        eventually(lambda: http.get("/ready").status_code == 200)


def test_a_killed_server_leaves_no_orphan(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = ServerProcess(["fake", FRONTEND, "", "server.port=0", "engine.model=fake"])
    server.await_listening()
    server.await_line("ready:")
    engine = server.engine()
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()
    gone, _ = psutil.wait_procs([engine], timeout=20)
    assert gone
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_too_deep_for_a_socket_is_a_clear_error(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    status, log = failing()
    assert status == 1
    assert "TMPDIR" in log.splitlines()[-1]


def test_the_private_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving() as server:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_two_servers_on_one_port_do_not_both_start():
    with serving() as server:
        status, log = failing(f"server.port={server.port}")
        assert status == 1
        assert str(server.port) in log


def test_the_http_process_imports_no_torch():
    code = (
        "import sys, interlock.server.run, interlock.tokenizer, interlock.chat,"
        " interlock.weights.resolve; sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CORE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_many_requests_leave_nothing_behind():
    with serving(engine__max_num_seqs=8) as server, client_of(server) as http:

        def run(i):
            body = {"prompt": f"!say {i}", "n": 1 + i % 3, "stream": i % 2 == 0}
            return http.post(TEXT, json=body).status_code

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(run, range(150))) == {200}
        before = psutil.Process(server.process.pid).num_fds()
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(run, range(150))) == {200}
        assert psutil.Process(server.process.pid).num_fds() <= before + 20
        eventually(lambda: gauge(http, "interlock_num_requests_running") == 0)
