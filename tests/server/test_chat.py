"""/v1/chat/completions through the official client.

Reports HTTP-11, HTTP-12, HTTP-13, HTTP-15, SEC-06, SEC-09, SMP-11.
"""

from __future__ import annotations

import httpx
import pytest

from server.harness import serving

USER = {"role": "user", "content": "!say hello"}


def chat(client, messages=(USER,), **options):
    return client.chat.completions.create(model="fake", messages=list(messages), **options)


def test_answer(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client, name):
    answer = chat(client, **{name: 3})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_it_runs_to_the_context(client):
    answer = chat(client, [{"role": "user", "content": "no orders"}])
    assert answer.usage.total_tokens == 512


def test_logprobs(client):
    answer = chat(client, [{"role": "user", "content": "!say é"}], logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert content[0].bytes == [0xC3]
    assert len(content[0].top_logprobs) == 3
    assert content[-1].token == "<eos>"
    assert chat(client).choices[0].logprobs is None
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert bare[0].top_logprobs == []


def test_rendering_follows_the_template(http):
    def text(messages, **body):
        tokens = http.post("/tokenize", json={"messages": messages, **body}).json()["tokens"]
        body = {"tokens": tokens, "skip_special_tokens": False}
        return http.post("/detokenize", json=body).json()["prompt"]

    history = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
    ]
    assert text(history) == (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nB\nC<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(history, add_generation_prompt=False).endswith("C<|im_end|>\n")
    final = [*history, {"role": "assistant", "content": "Sure, "}]
    assert text(final, continue_final_message=True).endswith("assistant\nSure, ")
    assert '"name": "f"' in text(history, tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tools": [[]]}, "tools[0]"),
        *(
            ({"structured_outputs": options}, "structured_outputs")
            for options in (
                {"regex": "("},
                {"json_object": False},
                {"json": ""},
                {"grammar": "x ::"},
            )
        ),
        ({"guided_regex": "("}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "("}}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(http, body, param):
    answer = http.post("/v1/chat/completions", json={"messages": [USER], **body} if body else {})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "Traceback" not in answer.text


def test_an_empty_assistant_turn_is_an_answerable_history(client):
    history = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "!say B"},
    ]
    assert chat(client, history).choices[0].finish_reason == "stop"


def test_the_templates_own_message_reaches_the_client(http):
    body = {"messages": [{"role": "tool", "content": "x"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "a tool cannot speak first" in answer.json()["error"]["message"]


def test_an_assistant_turn_may_have_content_and_tool_calls(http):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ("thinking", None, ""):
        history = [
            {"role": "user", "content": "A"},
            {"role": "user", "content": "B"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            USER,
        ]
        answer = http.post("/v1/chat/completions", json={"messages": history})
        assert answer.status_code == 200, answer.text


def test_neutral_values_are_accepted(http):
    body = {
        "messages": [USER],
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_model_without_a_template():
    with (
        serving("fake-base") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert "no chat template" in server.log
        answer = http.post("/v1/chat/completions", json={"messages": [USER]})
        assert answer.status_code == 400
        assert "chat_template" in answer.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"prompt": "!say ok"})
        assert answer.json()["choices"][0]["text"] == "ok"
