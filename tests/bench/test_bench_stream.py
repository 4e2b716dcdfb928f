"""MET-05: tools that take a chunk for a token, or the first `content` for the first token."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from interlock.bench.http_target import StreamReader, UrlSession
from interlock.bench.metrics import Trace
from interlock.bench.spec import Load, Target
from interlock.errors import InterlockError


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


FINAL_USAGE = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 12}}

RECORDED = [
    (100.00, delta(role="assistant", content="")),
    (100.50, delta(reasoning_content="Let me think")),
    (100.53, delta(reasoning_content=" about it")),
    (100.55, delta(content="")),
    (100.59, delta(content="The answer is")),
    (100.65, delta(content=" forty two.")),
    (100.66, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    (100.67, FINAL_USAGE),
]


def replay(events: list[tuple[float, dict[str, Any]]], start: float = 100.0) -> Trace:
    reader = StreamReader(start, prompt_tokens=10)
    for now, event in events:
        reader.feed("data: " + json.dumps(event), now)
        reader.feed("", now)
    reader.feed("data: [DONE]", events[-1][0])
    return reader.finish(events[-1][0])


def with_counts(
    events: list[tuple[float, dict[str, Any]]], counts: list[int]
) -> list[tuple[float, dict[str, Any]]]:
    return [
        (now, {**event, "usage": {"prompt_tokens": 10, "completion_tokens": count}})
        for (now, event), count in zip(events, counts, strict=True)
    ]


def test_first_token_is_the_first_delta_of_any_kind() -> None:
    assert replay(RECORDED).ttft == pytest.approx(0.5)


def test_itl_counts_tokens_not_chunks() -> None:
    trace = replay(RECORDED)
    assert trace.itls() == pytest.approx([0.01] * 3 + [0.02] * 6)
    assert trace.tpot == pytest.approx(0.15 / 9)
    assert trace.output_tokens == 12


def test_even_spread_is_marked_as_estimated() -> None:
    assert replay(RECORDED).estimated


def test_latency_ends_with_the_last_token() -> None:
    assert replay(RECORDED).latency == pytest.approx(0.65)


def test_continuous_usage_gives_exact_counts_per_chunk() -> None:
    trace = replay(with_counts(RECORDED, [0, 1, 4, 4, 6, 11, 12, 12]))
    assert not trace.estimated
    assert trace.arrivals == [
        (100.50, 1.0),
        (100.53, 3.0),
        (100.59, 2.0),
        (100.65, 5.0),
        (100.66, 1.0),
    ]
    assert trace.tpot == pytest.approx(0.16 / 11)


def test_tokens_of_half_a_character_arrive_without_text() -> None:
    events = [(100.1, delta(content="")), (100.2, delta(content="🚀"))]
    trace = replay(with_counts(events, [1, 2]))
    assert trace.arrivals == [(100.1, 1.0), (100.2, 1.0)]


def test_usage_in_the_last_choice_only_is_not_taken_for_its_own_tokens() -> None:
    events = [(100.0 + i, delta(content="x")) for i in range(1, 4)]
    last = (103.0, {**events[-1][1], "usage": {"completion_tokens": 3, "prompt_tokens": 10}})
    trace = replay([*events[:-1], last])
    assert trace.arrivals == [(101.0, 1.0), (102.0, 1.0), (103.0, 1.0)]
    assert not trace.estimated


def test_tool_calls_and_completions_text_are_deltas_too() -> None:
    call = delta(tool_calls=[{"index": 0, "function": {"name": "f"}}])
    text = {"choices": [{"index": 0, "text": "hello"}]}
    assert replay([(100.3, call)]).ttft == pytest.approx(0.3)
    assert replay([(100.4, text)]).ttft == pytest.approx(0.4)


def test_an_error_event_fails_the_request() -> None:
    assert replay([(100.1, {"error": {"message": "engine died"}})]).error == "engine died"


def test_a_stream_without_tokens_is_a_failure() -> None:
    assert replay([(100.1, delta(role="assistant"))]).error == "the server sent no token"


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams three chunks of two tokens each; notes bodies and how many run at once."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    status = 200

    def do_GET(self) -> None:
        if self.path == "/plugins":
            plugins = [{"name": "p", "counters": {"calls_total": float(len(Handler.bodies))}}]
            self._send(json.dumps({"plugins": plugins}).encode(), "application/json")
            return
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        Handler.bodies.append(json.loads(self.rfile.read(length)))
        events = [
            {
                "choices": [{"index": 0, "text": "ab"}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2 * i},
            }
            for i in (1, 2, 3)
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(Handler.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.bodies, Handler.status = [], 200
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


LOAD = Load(concurrency=2, num_requests=5, prompt_tokens=3, output_tokens=6)


def test_url_session_measures_every_prompt_in_order(server: str) -> None:
    prompts = [[i, i, i] for i in range(5)]
    session = UrlSession(Target(kind="url", url=server))
    traces = session.run(LOAD, prompts)
    assert [t.output_tokens for t in traces] == [6] * 5
    assert sorted(body["prompt"][0] for body in Handler.bodies) == [0, 1, 2, 3, 4]
    body = Handler.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (6, 0.0, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert session.info()["model_name"] == "tiny"


def test_url_session_reports_http_errors_per_request(server: str) -> None:
    session = UrlSession(Target(kind="url", url=server))
    Handler.status = 500
    traces = session.run(LOAD, [[1, 2, 3]])
    assert traces[0].error is not None
    assert "HTTP 500" in traces[0].error


def test_counters_of_an_interlock_server_are_read_from_it(server: str) -> None:
    session = UrlSession(Target(kind="url", url=server))
    before = session.counters()
    session.run(LOAD, [[1, 2, 3]] * 4)
    assert (before, session.counters()) == (
        {"p": {"calls_total": 0.0}},
        {"p": {"calls_total": 4.0}},
    )


def test_the_process_that_listens_is_found(server: str) -> None:
    assert UrlSession(Target(kind="url", url=server)).pids() == [os.getpid()]


def test_url_session_says_when_nobody_listens() -> None:
    with pytest.raises(InterlockError, match="cannot list its models"):
        UrlSession(Target(kind="url", url="http://127.0.0.1:9"))
