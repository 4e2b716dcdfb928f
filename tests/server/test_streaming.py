"""Server-sent events: deltas, roles, usage, errors.

Reports STR-01, STR-04, STR-05, STR-08, STR-09, STR-10, STR-12, MET-05, SCH-12.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.harness import serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def events(http, path, body):
    """Data lines of a stream; every one must be a JSON document or [DONE]."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert answer.text.endswith("\n\n")
    return [line[6:] for line in lines]


def chunks(http, path, body):
    lines = events(http, path, body)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def messages(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("text", ["hello", "héllo 🫠 龜 ď", "x" * 100])
def test_deltas_add_up_to_the_whole(http, text, size):
    body = {"prompt": f"!chunk {size} !say {text}", "max_tokens": 300}
    whole = http.post(TEXT, json=body).json()
    parts = chunks(http, TEXT, body)
    deltas = [c["choices"][0]["text"] for c in parts]
    assert "".join(deltas) == whole["choices"][0]["text"] == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert len({(c["id"], c["created"], c["model"]) for c in parts}) == 1
    assert [c["choices"][0]["finish_reason"] for c in parts][-1] == "stop"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_end_in_the_middle_of_a_character(http, cut):
    body = {"prompt": "!say 🫠", "max_tokens": cut}
    whole = http.post(TEXT, json=body).json()["choices"][0]["text"]
    deltas = [c["choices"][0]["text"] for c in chunks(http, TEXT, body)]
    assert "".join(deltas) == whole == "\ufffd"


@pytest.mark.parametrize("stop", ["lo", "it am", "<|im_end|>\n", "Observation:"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_chunks(http, stop, include):
    text = f"before {stop} after"
    if "\n" in stop:
        text, stop = "before Observ after", "Observ"
    body = {"prompt": f"!say {text}", "stop": [stop], "max_tokens": 200}
    body["include_stop_str_in_output"] = include
    whole = http.post(TEXT, json=body).json()["choices"][0]
    parts = chunks(http, TEXT, body)
    expected = "before " + (stop if include else "")
    assert whole["text"] == expected
    assert "".join(c["choices"][0]["text"] for c in parts) == expected
    assert parts[-1]["choices"][0]["stop_reason"] == stop == whole["stop_reason"]


def lengths(answer):
    return [len(choice["message"]["content"]) for choice in answer["choices"]]


def first_choice_ends_first(http):
    """A request of four choices of which choice 0 ends long before the others."""
    for seed in range(100):
        body = {**messages("some prompt"), "n": 4, "seed": seed, "max_tokens": 20, "stop": ["a"]}
        whole = http.post(CHAT, json=body).json()
        first, *others = lengths(whole)
        if first + 3 < min(others):
            return body, whole
    raise AssertionError("no seed lets choice 0 end first")


def test_chat_roles_deltas_and_one_finish_per_choice(http):
    body, whole = first_choice_ends_first(http)
    roles, texts, finishes = [], defaultdict(str), defaultdict(list)
    for chunk in chunks(http, CHAT, body):
        assert chunk["object"] == "chat.completion.chunk"
        (choice,) = chunk["choices"]
        if "role" in choice["delta"]:
            roles.append(choice["index"])
            assert choice["index"] not in texts
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finishes[choice["index"]].append(choice["finish_reason"])
    assert sorted(roles) == [0, 1, 2, 3]
    assert [texts[i] for i in range(4)] == [c["message"]["content"] for c in whole["choices"]]
    assert {i: r[0] for i, r in finishes.items()} == {
        c["index"]: c["finish_reason"] for c in whole["choices"]
    }
    assert all(len(reasons) == 1 for reasons in finishes.values())


@pytest.mark.parametrize(
    "body", [{"prompt": "!say abc"}, {"prompt": "!say abc", "n": 2}, {"prompt": "!end"}]
)
def test_usage_is_one_last_chunk_when_asked_for(http, body):
    whole = http.post(TEXT, json=body).json()["usage"]
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in c for c in chunks(http, TEXT, {**body, **options}))
    parts = chunks(http, TEXT, {**body, "stream_options": {"include_usage": True}})
    assert all(c["usage"] is None for c in parts[:-1])
    assert all(len(c["choices"]) == 1 for c in parts[:-1])
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole


def test_continuous_usage_counts_every_token(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "!chunk 3 !say abcdefgh", "stream_options": options}
    counts = [c["usage"]["completion_tokens"] for c in chunks(http, TEXT, body)]
    assert counts == [3, 6, 9, 9]


def test_the_official_client_reads_the_stream(client):
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "!say hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    parts = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in parts if c.choices)
    entries = [
        e
        for c in parts
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content
    ]
    assert text == "hi"
    assert len(entries) == parts[-1].usage.completion_tokens == 3


def test_streams_at_concurrency_keep_apart(http):
    def run(i):
        body = {"prompt": f"!chunk {1 + i % 3} !say number {i}", "max_tokens": 100}
        return "".join(c["choices"][0]["text"] for c in chunks(http, TEXT, body))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(run, range(48))) == [f"number {i}" for i in range(48)]


def test_echo_and_token_ids_in_a_stream(http):
    body = {"prompt": "!say ab", "echo": True, "logprobs": 1, "return_token_ids": True}
    whole = http.post(TEXT, json=body).json()["choices"][0]
    parts = [c["choices"][0] for c in chunks(http, TEXT, body)]
    assert "".join(p["text"] for p in parts) == whole["text"] == "!say abab"
    assert [t for p in parts for t in p["token_ids"]] == whole["token_ids"]
    for name, rows in whole["logprobs"].items():
        assert [r for p in parts if p["logprobs"] for r in p["logprobs"][name]] == rows


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_real_status(http, stream):
    answer = http.post(TEXT, json={"prompt": "!error", "stream": stream})
    assert answer.status_code == 500
    assert "NaN" in answer.json()["error"]["message"]
    assert "cmpl-" in answer.json()["error"]["message"]
    refused = http.post(TEXT, json={"prompt": "!refuse", "stream": stream})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "refused"
    bug = http.post(TEXT, json={"prompt": ["!say a", "!bug"], "stream": stream})
    assert bug.status_code == 500


def test_a_later_error_is_an_event_and_the_stream_is_not_done(http):
    lines = events(http, TEXT, {"prompt": "!slow 0.05 !error-after 3 x", "max_tokens": 10})
    assert len(lines) == 4
    error = json.loads(lines[-1])["error"]
    assert error["type"] == "server_error"
    assert "[DONE]" not in lines


def test_one_failing_choice_leaves_neighbours_alone(http):
    with ThreadPoolExecutor(4) as pool:
        failing = pool.submit(http.post, TEXT, json={"prompt": "!slow 0.01 !error-after 5 x"})
        normal = pool.submit(http.post, TEXT, json={"prompt": "!slow 0.01 !say neighbours"})
        assert failing.result().status_code == 500
        assert normal.result().json()["choices"][0]["text"] == "neighbours"


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_raises_is_never_an_empty_success(stream):
    import httpx

    with serving() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post(TEXT, json={"prompt": "!raise", "stream": stream})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "told to raise" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 503
