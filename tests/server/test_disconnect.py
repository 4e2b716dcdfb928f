"""A client that goes away takes its work along: stream or not, FIN or RST, running or queued.

Reports SCH-07, SCH-09, SCH-10, SEC-05.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.harness import ServerProcess, eventually, gauge, serving

LONG = "!slow 0.02 x"


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    with serving(engine__max_num_seqs=4, engine__max_waiting=6) as server:
        yield server


@pytest.fixture
def http(narrow) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.url, timeout=60) as client:
        yield client
        idle(client)
        answer = client.post("/v1/completions", json={"prompt": "!say ok"})
        assert answer.json()["choices"][0]["text"] == "ok"


def idle(client):
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        eventually(lambda name=name: gauge(client, f"interlock_{name}") == 0)
        assert gauge(client, f"vllm:{name}") == 0


def aborts(client):
    return gauge(client, "interlock_request_success_total", finished_reason="abort")


def open_request(server, **body):
    data = json.dumps({"prompt": LONG, "max_tokens": 500, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    sock.sendall(head.encode() + data)
    return sock


def fill(server, http):
    """Requests that run in all four slots and wait in all six places of the queue."""
    sockets = [open_request(server, stream=i % 2 == 0) for i in range(4)]
    eventually(lambda: gauge(http, "interlock_num_requests_running") == 4)
    sockets += [open_request(server, stream=i % 2 == 0) for i in range(6)]
    eventually(lambda: gauge(http, "interlock_num_requests_waiting") == 6)
    return sockets


def close(sock, reset):
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("padding", [0, 300_000])
def test_disconnect_aborts(narrow, http, stream, reset, padding):
    """Also after a body that filled the read buffer, which pauses reading."""
    before = aborts(http)
    sock = open_request(narrow, stream=stream, n=2, metadata={"pad": "x" * padding})
    eventually(lambda: gauge(http, "interlock_num_requests_running") == 2)
    if stream:
        assert b"data:" in sock.recv(65536)
    close(sock, reset)
    idle(http)
    eventually(lambda: aborts(http) == before + 2)
    assert gauge(http, "interlock_http_requests_active") <= 1


def test_queued_requests_that_go_away_leave_the_queue(narrow, http):
    sockets = fill(narrow, http)
    for number, sock in enumerate(sockets):
        close(sock, reset=number % 3 == 0)
    idle(http)


def test_a_full_queue_is_429_with_retry_after(narrow, http):
    sockets = fill(narrow, http)
    for stream in (False, True):
        answer = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    for sock in sockets:
        close(sock, reset=False)
    idle(http)


def test_a_group_is_queued_whole_or_not_at_all(narrow, http):
    answer = http.post("/v1/completions", json={"prompt": LONG, "n": 9, "max_tokens": 5})
    assert answer.status_code == 429
    idle(http)
    answer = http.post("/v1/completions", json={"prompt": LONG, "n": 11, "max_tokens": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("count", [4, 8, 40])
def test_after_many_aborts_there_are_still_slots(narrow, http, count):
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda i: close(open_request(narrow), i % 2 == 0), range(count)):
            pass
    idle(http)
    answer = http.post("/v1/completions", json={"prompt": "!say fine", "n": 4})
    assert [c["text"] for c in answer.json()["choices"]] == ["fine"] * 4
