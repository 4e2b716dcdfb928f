"""k3-nano as a user meets it: over HTTP with OpenAI's client, and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from interlock.weights.resolve import resolve
from parallel.ranks import environment
from server.harness import ServerProcess, serving

ASK = [{"role": "user", "content": 'Define "horse".'}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("k3-nano", real=True, engine__dtype="float32", engine__max_model_len=1024) as one:
        yield one


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(
        model="k3-nano", messages=ASK, temperature=0, max_tokens=60, **options
    )


def test_an_answer_without_thinking(client):
    answer = chat(client)
    message = answer.choices[0].message
    assert "horse" in message.content.lower()
    assert "<|" not in message.content
    assert not getattr(message, "reasoning_content", None)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("options", [{}, {"reasoning_effort": "low"}, {"tools": TOOLS}])
def test_streamed_and_whole_are_the_same(client, options):
    whole = chat(client, **options)
    text, thought, last, usage = "", "", None, None
    stream = chat(client, stream=True, stream_options={"include_usage": True}, **options)
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            last = choice.finish_reason or last
    assert text == (whole.choices[0].message.content or "")
    assert thought == (getattr(whole.choices[0].message, "reasoning_content", None) or "")
    assert last == whole.choices[0].finish_reason
    assert usage == whole.usage


def test_thinking_is_reasoning_content(client):
    message = chat(client, reasoning_effort="low").choices[0].message
    assert message.reasoning_content


def test_stop_strings_are_looked_for_in_what_is_visible(client):
    plain = chat(client, reasoning_effort="low").choices[0].message
    # The names of the channels are no text.
    same = chat(client, reasoning_effort="low", stop=["response", "think<"]).choices[0].message
    assert same.content == plain.content
    whole = chat(client).choices[0].message.content
    cut = chat(client, stop=["noun"]).choices[0]
    assert cut.message.content == whole.partition("noun")[0] != whole
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"thinking": 3}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(server, body, param):
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "k3-nano", "messages": ASK, "max_tokens": 2, **body},
        timeout=60,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tokenize_renders_the_chat(server):
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": ASK}, timeout=60).json()
    again = httpx.post(
        f"{server.url}/detokenize",
        json={"tokens": answer["tokens"], "skip_special_tokens": False},
        timeout=60,
    ).json()["prompt"]
    assert again == (
        '<|open|>message role="user"<|sep|>Define "horse".<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def interlock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "interlock", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_needs_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path / "none"))
    said = interlock("chat", "--model", "k3-nano", "--temperature", "0", 'Define "horse".')
    assert said.returncode == 0, said.stderr
    assert "horse" in said.stdout.lower()
    assert "<|" not in said.stdout
    # Compiled kernels may be kept there, models not.
    assert not (tmp_path / "none" / "models").exists()
    listed = json.loads(interlock("models", "list", "--json").stdout)
    assert {m["name"] for m in listed["models"]} >= {"k3-nano", "kimi-k3"}
    facts = json.loads(interlock("models", "inspect", "k3-nano", "--tp", "8", "--json").stdout)
    assert 5e6 < facts["parameters"] < 15e6


def test_both_models_ship_within_their_size():
    folder = resolve("k3-nano").path
    files = [*folder.iterdir(), *(folder.parent / "k3-nano-dspark").iterdir()]
    assert sum(path.stat().st_size for path in files) < 16 * 2**20
