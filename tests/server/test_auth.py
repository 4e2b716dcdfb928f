"""`server.api_key` covers every route but /health (report SEC-03)."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from server.harness import ServerProcess, serving

ROUTES = [
    ("GET", "/"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/plugins"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
TRICKS = [
    "//v1/models",
    "/V1/models",
    "/v1/models/",
    "/v1//models",
    "/./v1/models",
    "/health/../v1/models",
    "/health/",
    "//health",
    "/HEALTH",
    "/health%2f..%2fv1/models",
    "/v1/models?x=/health",
    "/v1/models#/health",
    "/nope",
    "http://x/health/../v1/models",
    "*",
]


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    with serving(server__api_key="one,two") as server:
        yield server


@pytest.fixture
def http(locked) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=60) as client:
        yield client


def test_the_list_of_routes_is_complete():
    from interlock.server import routes_openai, routes_ops

    known = {(m, p.replace("<model_id:path>", "fake")) for p, m, _ in routes_openai.ROUTES}
    known |= {(m, p) for p, m, _ in routes_ops.ROUTES}
    assert known == {*ROUTES, ("GET", "/health")}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_a_key(http, method, path):
    for verb in (method, "HEAD", "OPTIONS", "PUT"):
        for headers in (
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer three"},
            {"authorization": "Basic one"},
            {"authorization": "one"},
            {"authorization": "Bearer on"},
            {"authorization": b"Bearer \xff\xfe"},
        ):
            answer = http.request(verb, path, headers=headers)
            assert answer.status_code == 401, (verb, headers)
            assert answer.headers["www-authenticate"] == "Bearer"
        if verb == method:
            error = http.request(verb, path).json()["error"]
            assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize("target", TRICKS)
@pytest.mark.parametrize("verb", ["GET", "POST", "HEAD", "OPTIONS"])
def test_spellings_do_not_get_around_it(locked, target, verb):
    with socket.create_connection(("127.0.0.1", locked.port), timeout=30) as sock:
        sock.sendall(f"{verb} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        while part := sock.recv(65536):
            answer += part
    status = int(answer.split(b" ")[1])
    assert status in (400, 401), answer
    assert b"fake" not in answer


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_key_opens(locked, http, key):
    headers = {"authorization": f"bearer {key}"}
    assert http.get("/v1/models", headers=headers).status_code == 200
    assert http.get("/v1/nope", headers=headers).status_code == 404
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="fake", prompt="!say x").choices[0].text == "x"


def test_health_is_open(http):
    assert http.get("/health").status_code == 200
    assert http.head("/health").status_code == 200


def test_a_refused_body_does_not_disturb_the_connection(http):
    for _ in range(3):
        answer = http.post("/v1/completions", json={"prompt": "x" * 500_000})
        assert answer.status_code == 401
    assert http.get("/health").status_code == 200


def test_metrics_may_be_opened_alone():
    with (
        serving(server__api_key="one", server__metrics_without_key="true") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.get("/metrics").status_code == 200
        assert http.get("/metrics/").status_code == 401
        assert http.get("/plugins").status_code == 401
