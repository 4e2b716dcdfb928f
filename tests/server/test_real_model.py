"""The server over the real engine and a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from server.harness import ServerProcess, eventually, gauge, serving
from tinymodels import write_tiny_hf

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[ServerProcess]:
    folder = write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny")
    with serving(
        str(folder),
        real=True,
        engine__served_model_name="tiny",
        engine__dtype="float32",
        engine__num_blocks=128,
        engine__max_num_seqs=8,
        engine__threads=1,
        server__max_body_bytes=4 * 2**20,
    ) as server:
        yield server


@pytest.fixture
def http(real) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=120) as client:
        yield client
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            eventually(lambda name=name: gauge(client, f"interlock_{name}") == 0)


@pytest.fixture
def client(real) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


def chunks(http, path, body):
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(http, body):
    answer = http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("options", [{}, {"seed": 3, "temperature": 1.0}, {"n": 3, "seed": 4}])
def test_streamed_and_whole_texts_are_equal(http, options):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **options}
    whole = http.post(TEXT, json=body).json()
    texts: dict[int, str] = {}
    for chunk in chunks(http, TEXT, body):
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[i] for i in sorted(texts)] == [c["text"] for c in whole["choices"]]
    assert whole["usage"]["completion_tokens"] == 40 * len(whole["choices"])


def test_scoring_call(client, http):
    answer = client.completions.create(
        model="tiny", prompt="Your answer: Yes", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == "Your answer: Yes"
    assert answer.usage.completion_tokens == 0
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    again = http.post(
        TEXT,
        json={
            "prompt": "Your answer: Yes",
            "max_tokens": 1,
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
        },
    ).json()["choices"][0]
    scored = choice.logprobs.token_logprobs[1:]
    assert again["logprobs"]["token_logprobs"][1:-1] == pytest.approx(scored, abs=1e-4)


def test_chat_logprobs_and_usage(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    # Greedy: the chosen token is the most likely one.
    assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob) for entry in content)


def test_a_character_over_several_tokens_is_never_cut(http):
    """Forced bytes of an emoji, token by token."""
    ids = http.post("/tokenize", json={"prompt": "🫠龜ď"}).json()["tokens"]
    assert len(ids) > 3
    for cut in range(1, len(ids) + 1):
        body = {
            "prompt": PROMPT,
            "max_tokens": cut,
            "allowed_token_ids": ids,
            "ignore_eos": True,
            "seed": cut,
        }
        whole = text_of(http, body)
        deltas = [c["choices"][0]["text"] for c in chunks(http, TEXT, body)]
        assert "".join(deltas) == whole


def test_bias_bans_and_forces(http):
    base = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    forced = http.post(TEXT, json={**base, "logit_bias": {"70": 100}}).json()["choices"][0]
    assert forced["token_ids"] == [70] * 5
    normal = http.post(TEXT, json=base).json()["choices"][0]
    first = normal["token_ids"][0]
    banned = http.post(TEXT, json={**base, "logit_bias": {str(first): -100}}).json()["choices"][0]
    assert first not in banned["token_ids"]


def letters(http):
    """Ids of the printable ASCII characters: text and tokens then correspond one to one."""
    text = "".join(map(chr, range(33, 127)))
    ids = {i for c in text for i in http.post("/tokenize", json={"prompt": c}).json()["tokens"]}
    return sorted(ids)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_over_several_tokens(http, include):
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "allowed_token_ids": letters(http)}
    whole = text_of(http, body)
    for length in (2, 5, 10):
        stop = whole[20 : 20 + length]
        expected = whole[: whole.index(stop) + (length if include else 0)]
        stopped = {**body, "stop": ["no such text", stop], "include_stop_str_in_output": include}
        choice = http.post(TEXT, json=stopped).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (expected, stop)
        parts = [c["choices"][0] for c in chunks(http, TEXT, stopped)]
        assert "".join(p["text"] for p in parts) == expected
        assert parts[-1]["stop_reason"] == stop


@pytest.mark.parametrize("ending", ["length", "stop string", "stop token", "end of sequence"])
def test_logprobs_cover_every_token_however_it_ends(http, ending):
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 2, "allowed_token_ids": letters(http)}
    body |= {"logprobs": 1, "return_token_ids": True}
    plain = http.post(TEXT, json=body).json()["choices"][0]
    body |= {
        "length": {},
        "stop string": {"stop": plain["text"][6:8]},
        "stop token": {"stop_token_ids": plain["token_ids"][7:8]},
        "end of sequence": {"allowed_token_ids": [2]},
    }[ending]
    answer = http.post(TEXT, json=body).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["finish_reason"] == ("length" if ending == "length" else "stop")
    assert "".join(logprobs["tokens"]).startswith(choice["text"])
    counts = [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")]
    assert counts == [answer["usage"]["completion_tokens"]] * 3 == [len(choice["token_ids"])] * 3
    parts = [c["choices"][0]["logprobs"] for c in chunks(http, TEXT, body)]
    streamed = [value for p in parts if p for value in p["token_logprobs"]]
    assert streamed == pytest.approx(logprobs["token_logprobs"], abs=1e-5)


def test_an_empty_prompt_without_bos_is_refused(http):
    for prompt in ("", [""]):
        answer = http.post(TEXT, json={"prompt": prompt})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
    assert text_of(http, {"prompt": "a", "max_tokens": 2, "ignore_eos": True})


def test_prompt_length_limits(http):
    for stream in (False, True):
        for prompt in ("word " * 5000, list(range(100, 400)) * 20):
            answer = http.post(TEXT, json={"prompt": prompt, "stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = {"prompt": list(range(100, 160)) * 8, "max_tokens": 100, "ignore_eos": True}
    answer = http.post(TEXT, json=body).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_bad_parameters_hurt_no_neighbour(http):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = text_of(http, body)
    bad = [
        {"prompt": [-1]},
        {"prompt": [512]},
        {"prompt": "a", "n": 0},
        {"prompt": "a", "logit_bias": {"99999": 5}},
        {"prompt": "a", "temperature": 3},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
    ]
    raw = [f'{{"prompt":"a","temperature":{x}}}' for x in ("NaN", "-Infinity", "1e999")]
    json_type = {"content-type": "application/json"}
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(text_of, http, body) for _ in range(4)]
        refused = [pool.submit(http.post, TEXT, json=b) for b in bad * 4]
        refused += [pool.submit(http.post, TEXT, content=r, headers=json_type) for r in raw]
        assert {r.result().status_code for r in refused} == {400}
        assert [g.result() for g in good] == [expected] * 4


def test_health_is_quick_while_a_long_text_is_tokenized(http):
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x" * 3_000_000, "truncate_prompt_tokens": 10, "max_tokens": 1}
        slow = pool.submit(http.post, TEXT, json=body)
        answered = 0
        while not slow.done():
            assert http.get("/health").status_code == 200
            answered += 1
        assert slow.result().status_code == 200
        assert answered > 3


def test_info_is_the_models(http):
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    assert http.get("/ready").json() == {"ready": True}
    metrics = http.get("/metrics").text
    assert 'interlock_cache_config_info{block_size="16"' in metrics


def test_unseeded_samples_differ_across_requests(http):
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1, "ignore_eos": True}
    assert len({text_of(http, body) for _ in range(5)}) > 1


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    folder = write_tiny_hf(tmp_path / "broken", drop=["model.norm.weight"])
    server = ServerProcess(["real", "", "", "server.port=0", f"engine.model={folder}"])
    assert server.wait() == 1
    last = server.log.splitlines()[-1]
    assert last.startswith("interlock: error:")
    assert "model.norm.weight" in last
    assert "Traceback" not in server.log


def test_a_model_that_does_not_exist_is_one_line(tmp_path):
    server = ServerProcess(["real", "", "", "server.port=0", f"engine.model={tmp_path / 'none'}"])
    assert server.wait() == 1
    assert server.log.splitlines()[-1].startswith("interlock: error:")
    assert "Traceback" not in server.log
