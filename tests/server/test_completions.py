"""/v1/completions through the official client, without streaming.

Reports HTTP-03, HTTP-05, SMP-05, SMP-07, SMP-09, SMP-10, SMP-11, STR-05, STR-07, SPD-10, LDR-07.
"""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from server.harness import serving


def complete(client: openai.OpenAI, prompt, **options):
    return client.completions.create(model="fake", prompt=prompt, **options)


def test_text_usage_and_identity(client):
    answer = complete(client, "!say hello", max_tokens=50)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 6, 16)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_default_limit_is_16_tokens(client):
    answer = complete(client, "no orders")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("!say a", ["a"]),
        (["!say a", "!say b"], ["a", "b"]),
        (list(b"!say c"), ["c"]),
        ([list(b"!say d"), list(b"!say e")], ["d", "e"]),
    ],
)
def test_the_four_forms_of_a_prompt(client, prompt, texts):
    answer = complete(client, prompt)
    assert [c.text for c in answer.choices] == texts
    assert [c.index for c in answer.choices] == list(range(len(texts)))


def test_n_choices_differ_and_repeat_with_a_seed(client):
    runs = [complete(client, "Hello", n=4, seed=1, temperature=1).choices for _ in range(2)]
    texts = [[choice.text for choice in run] for run in runs]
    assert [choice.index for choice in runs[0]] == [0, 1, 2, 3]
    assert len(set(texts[0])) > 1
    assert texts[0] == texts[1]


def test_prompt_is_counted_once_for_n_choices(client):
    usage = complete(client, ["!say ab", "!say abc"], n=2).usage
    assert usage.prompt_tokens == len("!say ab") + len("!say abc")
    assert usage.completion_tokens == 2 * 3 + 2 * 4


def test_without_a_seed_samples_differ(client):
    texts = {complete(client, "x", temperature=1).choices[0].text for _ in range(8)}
    assert len(texts) > 1


def test_seeded_prompts_of_a_list_are_independent_and_free_of_position(client):
    def texts(prompts):
        return [c.text for c in complete(client, prompts, seed=7, temperature=1).choices]

    same = texts(["x", "x", "x", "x"])
    assert len(set(same)) == 4
    assert texts(["x", "x"]) == same[:2]
    assert texts(["y", "x"])[1] == same[0]
    assert texts(["x", "y", "x"])[2] == same[1]


def test_repeated_prompts_with_n_draw_from_separate_streams(client):
    choices = complete(client, ["x", "x"], n=2, seed=3, temperature=1).choices
    assert len({choice.text for choice in choices}) == 4


def test_echo_scores_a_prompt_without_generating(client):
    answer = complete(
        client, "Your answer: Yes", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == "Your answer: Yes"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(len(choice.text)))


def test_echo_without_logprobs_returns_prompt_and_completion(client):
    choice = complete(client, "!say x", echo=True).choices[0]
    assert choice.text == "!say xx"
    assert choice.logprobs is None


def test_echo_of_token_ids_decodes_them(client):
    assert complete(client, list(b"!say x"), echo=True).choices[0].text == "!say xx"


def test_logprobs_have_one_entry_per_token_and_spell_partial_bytes(client):
    answer = complete(client, "!say aé", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert logprobs.text_offset[:4] == [0, 1, 1, 2]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize(
    "ending",
    [{}, {"stop": ["lo"]}, {"stop_token_ids": [ord("l")]}, {"max_tokens": 3}],
)
def test_logprob_entries_equal_completion_tokens_however_it_ends(client, ending):
    options = {k: v for k, v in ending.items() if k != "stop_token_ids"}
    extra = {k: v for k, v in ending.items() if k == "stop_token_ids"}
    args = {"logprobs": 0, **options, "extra_body": extra}
    whole = complete(client, "!say hello", **args)
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    chunks = list(complete(client, "!say hello", stream=True, **args))
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert streamed == whole.choices[0].logprobs.tokens


def test_prompt_logprobs_in_the_shape_of_vllm(http):
    body = {"prompt": "ab", "prompt_logprobs": 1, "max_tokens": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ord("b"))] == {"logprob": -0.25, "rank": 1, "decoded_token": "b"}


def test_stop_reason_names_the_stop(http):
    def choice(**body):
        answer = http.post("/v1/completions", json={"prompt": "!say hello", **body})
        return answer.json()["choices"][0]

    by_string = choice(stop="ll")
    assert (by_string["text"], by_string["stop_reason"]) == ("he", "ll")
    included = choice(stop=["ll"], include_stop_str_in_output=True)
    assert included["text"] == "hell"
    by_token = choice(stop_token_ids=[ord("e")])
    assert by_token["stop_reason"] == ord("e")
    assert choice()["stop_reason"] is None


def test_special_tokens_are_hidden_unless_asked_for(http):
    def text(**body):
        answer = http.post("/v1/completions", json={"prompt": "!end", "max_tokens": 2, **body})
        return answer.json()["choices"][0]["text"]

    assert text() == ""
    assert text(skip_special_tokens=False, ignore_eos=True) == "<eos><eos>"


def test_token_ids_metrics_and_request_id_are_given_when_asked_for(http):
    body = {
        "prompt": "!say ab",
        "return_token_ids": True,
        "return_metrics": True,
        "request_id": "my-id.1",
    }
    response = http.post("/v1/completions", json=body)
    answer = response.json()
    choice = answer["choices"][0]
    assert answer["id"] == "cmpl-my-id.1" == response.headers["x-request-id"]
    assert choice["token_ids"] == [ord("a"), ord("b"), 257]
    assert choice["prompt_token_ids"] == list(b"!say ab")
    assert {"queue_s", "prefill_s", "decode_s", "cached_tokens", "plugins"} <= set(
        choice["metrics"]
    )


@pytest.mark.parametrize(
    ("header", "shown"), [("proxy-7", "cmpl-proxy-7"), ("a b", None), ("x" * 129, None), ("", None)]
)
@pytest.mark.parametrize("prompt", ["!say a", "!error"])
def test_the_callers_x_request_id_comes_back_also_with_an_error(http, prompt, header, shown):
    headers = {"x-request-id": header}
    answer = http.post("/v1/completions", json={"prompt": prompt}, headers=headers)
    assert answer.status_code == (500 if prompt == "!error" else 200)
    given = answer.headers["x-request-id"]
    assert given == shown if shown else given.startswith("cmpl-")
    assert header == "" or shown or header not in given
    own = {"prompt": prompt, "request_id": "own"}
    answer = http.post("/v1/completions", json=own, headers=headers)
    assert answer.headers["x-request-id"] == "cmpl-own"


def test_truncate_prompt_tokens_keeps_the_end(http):
    body = {"prompt": "xxxx!say b", "truncate_prompt_tokens": 6, "echo": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "!say bb"
    assert answer["usage"]["prompt_tokens"] == 6


def test_null_means_the_default(http):
    names = ("max_tokens", "temperature", "n", "stop", "seed", "logit_bias", "stream")
    body = dict.fromkeys(names)
    answer = http.post("/v1/completions", json={"prompt": "no orders", **body}).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stop", [[], None])
def test_no_stop_at_all(http, stop):
    answer = http.post("/v1/completions", json={"prompt": "!say hi", "stop": stop})
    assert answer.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.0},
        {"temperature": 0},
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {"299": 100, "0": -100}},
        {"best_of": 1},
        {"suffix": ""},
        {"service_tier": "auto", "store": False, "user": "u", "metadata": {"a": "b"}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"cache_salt": "s" * 1024},
        {"priority": -5, "allowed_token_ids": [1, 2]},
    ],
)
def test_boundary_values_work(http, fields):
    answer = http.post("/v1/completions", json={"prompt": "!say ok", **fields})
    assert answer.status_code == 200, answer.text


def test_prompt_plus_max_tokens_over_the_context_ends_with_length(client):
    answer = complete(client, "x" * 500, max_tokens=100)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_deadline_before_the_first_token_is_504_and_later_a_finish_reason(http):
    slow = {"prompt": "!stall 0.5 !say abc", "timeout_s": 0.2}
    answer = http.post("/v1/completions", json=slow)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    late = {"prompt": "!slow 0.05 x", "max_tokens": 400, "timeout_s": 0.5}
    choice = http.post("/v1/completions", json=late).json()["choices"][0]
    assert choice["finish_reason"] == "timeout"
    assert 0 < len(choice["text"]) < 400


def test_empty_prompt_depends_on_bos(http):
    for prompt in ("", [""], [], [[]]):
        answer = http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt"


def test_empty_prompt_and_bos_and_served_name():
    with (
        serving("fake-bos", engine__served_model_name="public") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for prompt in ("", [""]):
            answer = http.post("/v1/completions", json={"prompt": prompt, "model": "fake-bos"})
            assert answer.status_code == 404
            answer = http.post("/v1/completions", json={"prompt": prompt, "model": "public"})
            assert answer.json()["usage"]["prompt_tokens"] == 1
        counts = [
            http.post("/tokenize", json={"prompt": "a", "add_special_tokens": s}).json()["count"]
            for s in (True, False, None)
        ]
        assert counts == [2, 1, 2]
        body = {"messages": [{"role": "user", "content": "!say hi"}]}
        chat = http.post("/tokenize", json=body).json()["tokens"]
        assert chat.count(256) == 0
        run = http.post("/v1/completions", json={"prompt": "ab", "return_token_ids": True}).json()
        assert run["choices"][0]["prompt_token_ids"] == [256, 97, 98]


def test_models_tokenize_detokenize_version(http, client):
    before = time.time()
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("fake", "model")
    assert model.created <= before + 1
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    tokens = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert tokens["tokens"] == [104, 195, 169]
    assert tokens["count"] == 3
    assert tokens["max_model_len"] == 512
    assert tokens["token_strs"][0] == "<0x68>"
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "hé"}
    assert set(http.get("/version").json()) == {"version"}
    assert "interlock" in http.get("/").text
