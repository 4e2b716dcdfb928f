"""The load generator against our own server: both must count the same tokens (MET-05)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from interlock.bench.compare import check_lengths
from interlock.bench.http_target import UrlSession
from interlock.bench.spec import Load, Target
from server.harness import gauge, serving

LOAD = Load(concurrency=3, num_requests=6, prompt_tokens=0, output_tokens=24)


@pytest.fixture(scope="module")
def session() -> Iterator[UrlSession]:
    with serving() as server:
        yield UrlSession(Target(kind="url", url=server.url))


@pytest.mark.parametrize("chunk", [1, 3])
def test_tokens_per_chunk_are_those_that_the_engine_gave(session: UrlSession, chunk: int) -> None:
    prompt = list(f"!chunk {chunk} letters".encode())
    traces = session.run(LOAD, [prompt] * 6)
    for trace in traces:
        check_lengths(trace, len(prompt), LOAD)
    assert [t.error for t in traces] == [None] * 6
    assert all(t.output_tokens == 24 and not t.estimated for t in traces)
    # The server may join outputs that are ready together, but never invents or loses a token.
    assert all(tokens % chunk == 0 for t in traces for _, tokens in t.arrivals)


def test_the_servers_own_histograms_count_what_the_tool_counts(session: UrlSession) -> None:
    names = ("time_to_first_token_seconds", "inter_token_latency_seconds")
    url = session.info()["url"]

    def counts() -> list[float]:
        with httpx.Client(base_url=url) as http:
            return [gauge(http, f"interlock_{name}_count") for name in names]

    before = counts()
    traces = session.run(LOAD, [list(b"!chunk 3 letters")] * 6)
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    assert grown == [len(traces), sum(len(trace.itls()) for trace in traces)]


def test_the_server_and_its_engine_are_not_other_processes(session: UrlSession) -> None:
    assert session.pids()
