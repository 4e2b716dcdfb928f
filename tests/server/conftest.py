from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from server.harness import ServerProcess, serving


@pytest.fixture(scope="session")
def fake_server() -> Iterator[ServerProcess]:
    """One server with the fake engine for all tests that leave it whole."""
    with serving(server__max_n=8, server__max_prompts=16, server__max_body_bytes=2**20) as server:
        yield server


@pytest.fixture
def http(fake_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_server.url, timeout=60) as client:
        yield client
        # Whatever a test sent, the server answers the next request.
        answer = client.post("/v1/completions", json={"prompt": "!say ok"})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "ok"


@pytest.fixture
def client(fake_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
