"""Nothing that a client sends may hurt the server or other requests: 4xx, bounded, and alive.

Reports HTTP-01, HTTP-08, HTTP-10, HTTP-17, SMP-01, SMP-03, SMP-05, SEC-01, SEC-05, SEC-06, SEC-08,
SEC-12, STR-07, PFX-02.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.harness import gauge

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def refused(answer, status=400, param=None):
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < 16384
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true, x}',
        b"",
        b"\xff\xfe",
        b"[1]",
        b'"text"',
        b"null",
        b"{" * 100,
        b"[" * 100_000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"',
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_not_json(http, path, body):
    refused(http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_415(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    refused(http.post(TEXT, content=b'{"prompt":"!say a"}', headers=headers), 415)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"]
)
def test_json_with_parameters_is_read(http, kind):
    answer = http.post(TEXT, content=b'{"prompt":"!say a"}', headers={"content-type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_numbers_that_are_not_finite(http, path, field, number):
    prompt = '"prompt":"a"' if path == TEXT else '"messages":[{"role":"user","content":"a"}]'
    body = f'{{{prompt},"{field}":{number}}}'
    refused(http.post(path, content=body.encode(), headers=JSON))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 999999}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 100}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 300}, "prompt_logprobs"),
        ({"prompt_logprobs": 299}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e30}}, "logit_bias[5]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["", ">"]}, "stop"),
        ({"stop": [1]}, None),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 2**31}, "n"),
        ({"n": 1.5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 10**6}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"nope": 1}, "stream": True}, "stream_options.nope"),
        ({"stream": "yes"}, "stream"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"priority": 2**40}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"plugins": {"nope": {}}}, "plugins.nope"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 100_000}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_values_out_of_range_name_the_field(http, fields, param, stream):
    body = {"prompt": "a", **({"stream": True} if stream else {}), **fields}
    refused(http.post(TEXT, json=body), 400, param)


def test_stream_options_need_a_stream(http):
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    refused(http.post(TEXT, json=body), 400, "stream_options")


def test_token_ids_out_of_vocabulary_say_so_and_hurt_nobody(http):
    with ThreadPoolExecutor(2) as pool:
        normal = pool.submit(http.post, TEXT, json={"prompt": "!slow 0.02 !say fine"})
        for prompt in ([-1], [[-1]], [300]):
            error = refused(http.post(TEXT, json={"prompt": prompt, "max_tokens": 1}))
            assert "out of vocabulary" in error["message"]
        assert normal.result().json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("repeat_penalty", "repetition_penalty"),
        ("zzzzzz", None),
    ],
)
def test_unknown_fields_are_refused_with_the_near_match(http, field, hint):
    error = refused(http.post(TEXT, json={"prompt": "a", field: 1}), 400, field)
    assert ("did you mean" in error["message"]) == (hint is not None)
    assert hint is None or hint in error["message"]


def test_a_huge_unknown_field_is_not_echoed(http):
    refused(http.post(TEXT, json={"prompt": "a", "x" * 100_000: 1}))
    refused(http.post(TEXT, json={"prompt": "a", "request_id": "y" * 100_000}))
    refused(http.post(TEXT, json={"prompt": "a", "model": "z" * 100_000}), 404)
    refused(http.post(CHAT, json={"messages": [{"role": "r" * 100_000, "content": "x"}]}))


def test_many_wrong_items_give_one_short_answer(http):
    refused(http.post(CHAT, json={"messages": [5] * 5000}), 400, "messages[0]")
    refused(http.post(CHAT, json={"messages": [{"role": "x" * 50}] * 5000}), 400)


@pytest.mark.parametrize("field", ["tools", "messages", "prompt", "plugins", "metadata"])
@pytest.mark.parametrize("depth", [100, 900, 3000, 150_000])
def test_deep_nesting(http, field, depth):
    path = TEXT if field == "prompt" else CHAT
    messages = b'"messages":[{"role":"user","content":"a"}],' if path == CHAT else b""
    if field == "messages":
        messages = b""
    body = b"{" + messages + f'"{field}":'.encode() + b"[" * depth + b"]" * depth + b"}"
    refused(http.post(path, content=body, headers=JSON))
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = b"{" + messages + f'"{field}":'.encode() + b"[" + deep + b"]}"
    refused(http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_context(http, stream):
    for _ in range(5):
        for prompt in ("x" * 5120, list(b"x" * 5120), "x" * 512, "x" * 900_000):
            body = {"prompt": prompt, "stream": stream}
            error = refused(http.post(TEXT, json=body), 400, "prompt")
            assert error["code"] == "context_length_exceeded"
    body = {"messages": [{"role": "user", "content": "x" * 5120}], "stream": stream}
    error = refused(http.post(CHAT, json=body))
    assert error["code"] == "context_length_exceeded"
    assert gauge(http, "interlock_kv_cache_usage_perc") == 0


@pytest.mark.parametrize("size", [2**20 + 1, 8 * 2**20])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_over_the_limit_are_413(http, size, chunked):
    body = b'{"prompt":"' + b"x" * size + b'"}'
    content = (body[i : i + 65536] for i in range(0, len(body), 65536)) if chunked else body
    error = refused(http.post(TEXT, content=content, headers=JSON), 413)
    assert "max_body_bytes" in error["message"]


def test_an_announced_2_gb_body_is_refused_before_it_is_sent(fake_server):
    with socket.create_connection(("127.0.0.1", fake_server.port), timeout=30) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 2147483648\r\nexpect: 100-continue\r\n\r\n"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_8_kb_is_fine(http):
    body = {"prompt": "!say ok", "metadata": {"a": "x" * 8192}}
    assert http.post(TEXT, json=body).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n"
        b"content-length: 5\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 20000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
    ],
)
def test_broken_http_gets_a_4xx_in_json(http, fake_server, raw):
    with socket.create_connection(("127.0.0.1", fake_server.port), timeout=30) as sock:
        sock.sendall(raw)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    status = int(answer.split(b" ")[1])
    assert 400 <= status < 500
    assert b"error" in json.dumps(json.loads(answer.partition(b"\r\n\r\n")[2])).encode()


def test_methods_and_routes(http):
    refused(http.get("/nope"), 404)
    refused(http.get("/v1/embeddings"), 404)
    refused(http.get("/v1/models/other"), 404, "model")
    refused(http.get(TEXT), 405)
    assert "POST" in http.get(TEXT).headers["allow"]
    refused(http.post("/v1/models", json={}), 405)
    assert "GET" in http.post("/v1/models", json={}).headers["allow"]
    options = http.options(TEXT)
    assert options.status_code == 204
    assert "POST" in options.headers["allow"]
    head = http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    refused(http.post(TEXT, json={"prompt": "a", "model": "gpt-4"}), 404, "model")


def test_thousand_connections_opened_and_dropped(http, fake_server):
    address = ("127.0.0.1", fake_server.port)
    for batch in range(10):
        sockets = [socket.create_connection(address, timeout=30) for _ in range(100)]
        for number, sock in enumerate(sockets):
            if number % 3 == 0:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
            if number % 3 == 1:
                # RST instead of FIN.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        assert batch or http.get("/health").status_code == 200


def test_tokenize_and_detokenize_check_their_input(http):
    refused(http.post("/tokenize", json={}), 400, "prompt")
    refused(http.post("/tokenize", json={"prompt": "a", "messages": []}), 400, "prompt")
    refused(http.post("/tokenize", json={"prompt": 5}), 400, "prompt")
    refused(http.post("/detokenize", json={"tokens": [-1]}), 400, "tokens")
    refused(http.post("/detokenize", json={"tokens": [10**9]}), 400, "tokens")
    refused(http.post("/detokenize", json={"tokens": "abc"}), 400, "tokens")
    refused(http.post("/detokenize", json={}), 400)
    refused(http.post("/detokenize", json={"tokens": [1, 2, "3"]}), 400, "tokens[2]")


def test_health_answers_while_a_request_is_slow(http):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(http.post, TEXT, json={"prompt": "!stall 1 !say slow"})
        time.sleep(0.1)
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert not slow.done()
        assert slow.result().status_code == 200
