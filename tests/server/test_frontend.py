"""Tokenization happens beside the event loop, not on it (report SEC-12)."""

from __future__ import annotations

import asyncio

import pytest

from interlock.chat import ChatTemplate
from interlock.engine.outputs import EngineInfo, TokenLogprob
from interlock.errors import QueueFullError, RequestError
from interlock.server.frontend import Frontend
from interlock.server.logprobs import FLOOR, LegacyLogprobs, chat_logprobs, finite
from interlock.tokenizer import Tokenizer
from server.fake_engine import EOS, FakeTokenizer
from tinymodels import tiny_tokenizer

INFO = EngineInfo("tiny", "Fake", 512, 512, "float32", "cpu", 1, 16, "", [])


@pytest.fixture
def frontend():
    backend = Tokenizer(
        tiny_tokenizer(), vocab_size=512, eos_token_ids=[2], bos_token_id=None, add_bos=False
    )
    frontend = Frontend(backend, None, "tiny")
    frontend.open(INFO, places=2)
    yield frontend
    frontend.close()


def test_slow_text_leaves_the_event_loop_running(frontend):
    async def ticks_during_encoding():
        def encode():
            return frontend.encode("x" * 3_000_000, add_special_tokens=True, truncate=1)

        work = asyncio.ensure_future(frontend.run(encode))
        ticks = 0
        while not work.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks, len((await work).ids)

    ticks, tokens = asyncio.run(ticks_during_encoding())
    assert tokens > 1000
    assert ticks > 10


def test_hopeless_text_is_refused_without_tokenizing(frontend):
    with pytest.raises(RequestError) as error:
        frontend.encode("x" * 10_000_000, add_special_tokens=True)
    assert error.value.code == "context_length_exceeded"
    assert len(str(error.value)) < 200


def test_places_are_bounded_and_come_back(frontend):
    async def run():
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work():
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

        waiting = [asyncio.ensure_future(frontend.run(work)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await frontend.run(lambda: None)
        waiting[0].cancel()
        gate.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        while True:
            try:
                return await frontend.run(lambda: "free again")
            except QueueFullError:
                await asyncio.sleep(0.01)

    assert asyncio.run(run()) == "free again"


def test_a_stripping_template_still_continues_the_final_message(frontend):
    frontend.template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": " a b  "}]
    text = frontend.render(
        messages,
        add_generation_prompt=None,
        continue_final_message=True,
        tools=None,
        kwargs=None,
    )
    assert text == "[a b][a b"


def token_text(token):
    tokenizer = FakeTokenizer()
    raw = tokenizer.token_bytes(token)
    return raw.decode("utf-8", "replace"), raw


def test_infinite_logprobs_become_json_numbers():
    assert finite(float("-inf")) == finite(float("nan")) == FLOOR
    entry = TokenLogprob(97, -0.5, 1, [(97, -0.5), (98, float("-inf"))])
    (shown,) = chat_logprobs([entry], token_text)["content"]
    assert [t["logprob"] for t in shown["top_logprobs"]] == [-0.5, FLOOR]


def test_offsets_skip_hidden_tokens_and_count_characters():
    entries = [TokenLogprob(t, -1.0, 1, []) for t in (*"é".encode(), EOS, 97)]
    rows = LegacyLogprobs(token_text, frozenset({EOS})).rows([e.token_id for e in entries], entries)
    assert rows["text_offset"] == [0, 0, 1, 1]
    assert rows["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<eos>", "a"]
