"""A deterministic engine and front end for tests of the server: one byte is one token.

The prompt is the script. ``!say TEXT`` generates TEXT, one byte per step, then end of sequence;
any other prompt generates letters drawn from the request's own random stream. Faults:
``!raise`` (the step raises), ``!die`` (the process is killed), ``!stall S`` (a step takes S
seconds), ``!error`` (this request fails), ``!refuse`` (RequestError on add), ``!bug`` (add
raises), ``!error-after N`` (fails after N tokens), ``!end`` (eos at once).
Options: ``!slow S`` sleeps S seconds per step, ``!chunk N`` gives N tokens per output.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

from interlock.chat import ChatTemplate
from interlock.engine.outputs import (
    EngineInfo,
    EngineStats,
    Output,
    TextStream,
    TokenLogprob,
    final,
)
from interlock.engine.request import Request
from interlock.errors import QueueFullError, RequestError, WeightsError
from interlock.plugins import PluginReport
from interlock.server.frontend import Frontend
from interlock.settings import Settings

VOCAB = 300
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {BOS: "<bos>", EOS: "<eos>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
SPECIAL_TEXT = re.compile("|".join(re.escape(text) for text in SPECIAL.values()))
ORDERS = "raise|die|error-after|error|refuse|bug|stall|slow|chunk|end"
MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and loop.first %}{{ raise_exception('a tool cannot speak first') }}"
    "{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeTokenizer:
    """Bytes are tokens; 256 to 259 are special, 260 to 299 have no text."""

    vocab_size = VOCAB
    special_ids = frozenset(SPECIAL)

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if self.add_bos and add_special_tokens else []
        start = 0
        for match in SPECIAL_TEXT.finditer(text):
            ids += text[start : match.start()].encode()
            ids.append(next(i for i, t in SPECIAL.items() if t == match[0]))
            start = match.end()
        return ids + list(text[start:].encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in SPECIAL)]
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")

    def id_to_token(self, id: int) -> str | None:
        return SPECIAL.get(id) or (f"<0x{id:02X}>" if id < 256 else None)

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else SPECIAL.get(id, "").encode()


def load_frontend(settings: Settings) -> Frontend:
    name = settings.engine.model
    if name == "fake-missing":
        raise WeightsError("fake-missing: no such model")
    template = None if name == "fake-base" else ChatTemplate(TEMPLATE)
    tokenizer = FakeTokenizer(add_bos=name == "fake-bos")
    return Frontend(tokenizer, template, settings.engine.served_model_name or name)


def slow_frontend(settings: Settings) -> Frontend:
    time.sleep(60)
    return load_frontend(settings)


class FakeEngine:
    """Has the methods of `interlock.engine.engine.Engine`."""

    def __init__(self, settings: Settings, *, progress: Any = None) -> None:
        if settings.engine.model == "fake-broken":
            raise WeightsError("fake-broken: the file is cut short")
        if settings.engine.model == "fake-slow-load":
            time.sleep(60)
        if settings.engine.model == "fake-dies-loading":
            os.kill(os.getpid(), signal.SIGKILL)
        self.settings = settings.engine
        self.tokenizer = FakeTokenizer()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.scripts: dict[str, Script] = {}
        self._stats = EngineStats(num_blocks=64)
        self.info = EngineInfo(
            model_name=settings.engine.model,
            architecture="Fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            dtype="float32",
            device="cpu",
            num_blocks=64,
            block_size=16,
            fingerprint="fake-1",
            eos_token_ids=[EOS],
        )

    def add(self, request: Request) -> None:
        request.params.validate(VOCAB)
        script = Script(request, self.tokenizer)
        if "refuse" in script.orders:
            raise RequestError("refused by the engine", param="prompt", code="refused")
        if "bug" in script.orders:
            raise ZeroDivisionError("a bug in add")
        if len(self.waiting) >= self.settings.max_waiting:
            raise QueueFullError("the waiting queue is full", retry_after_s=3)
        hidden = self.tokenizer.special_ids if request.params.skip_special_tokens else frozenset()

        def bytes_of(token: int) -> bytes:
            return b"" if token in hidden else self.tokenizer.token_bytes(token)

        params = request.params
        request.text = TextStream(bytes_of, params.stop, params.include_stop_str_in_output)
        self.scripts[request.id] = script
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    request.finish_reason = "abort"
                    self.ended.append(request)
                    return True
        return False

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def step(self) -> list[Output]:
        outputs = [self._final(request) for request in self.ended]
        self.ended.clear()
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting.pop(0)
            request.first_scheduled = time.monotonic()
            self.running.append(request)
        paces = [float(self.scripts[r.id].orders.get("slow", "0")) for r in self.running]
        time.sleep(max(paces, default=0))
        for request in list(self.running):
            self._fault(request)
            outputs.append(self._advance(request))
        self._stats.steps_total += 1
        return outputs

    def _fault(self, request: Request) -> None:
        orders = self.scripts[request.id].orders
        if "raise" in orders:
            raise RuntimeError("the step was told to raise")
        if "die" in orders:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stall" in orders:
            time.sleep(float(orders.pop("stall")))

    def _advance(self, request: Request) -> Output:
        script, output = self.scripts[request.id], Output(request.id)
        if request.deadline is not None and time.monotonic() > request.deadline:
            return self._finish(request, "timeout", output)
        if "error" in script.orders or script.fails_now(request):
            request.error = "the row has NaN logits"
            return self._finish(request, "error", output)
        if request.params.prompt_logprobs is not None and not request.num_output_tokens:
            output.prompt_logprobs = [None] + [
                _logprob(t, request.params.prompt_logprobs) for t in request.prompt_token_ids[1:]
            ]
        if request.params.max_tokens == 0:
            return self._finish(request, "length", output)
        request.first_token = request.first_token or time.monotonic()
        for _ in range(int(script.orders.get("chunk", "1"))):
            self._token(request, output, script.token(request))
            if request.finish_reason is not None:
                return self._finish(request, request.finish_reason, output)
        return output

    def _token(self, request: Request, output: Output, token: int) -> None:
        params, text = request.params, request.text
        assert text is not None
        request.token_ids.append(token)
        output.token_ids.append(token)
        if params.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), _logprob(token, params.logprobs)]
        output.text += text.push(token)
        limit = MAX_MODEL_LEN - request.num_prompt_tokens
        if text.stopped_by is not None:
            request.finish_reason, request.stop_reason = "stop", text.stopped_by
        elif token in params.stop_token_ids:
            request.finish_reason, request.stop_reason = "stop", token
        elif token == EOS and not params.ignore_eos:
            request.finish_reason = "stop"
        elif request.num_output_tokens >= min(params.max_tokens or limit, limit):
            request.finish_reason = "length"

    def _finish(self, request: Request, reason: str, output: Output) -> Output:
        assert request.text is not None
        output.text += request.text.finish()
        request.finish_reason = reason
        self.running.remove(request)
        return self._final(request, output)

    def _final(self, request: Request, output: Output | None = None) -> Output:
        self.scripts.pop(request.id, None)
        return final(request, output or Output(request.id))

    def stats(self) -> EngineStats:
        self._stats.running = len(self.running)
        self._stats.waiting = len(self.waiting)
        self._stats.kv_usage = min(1.0, len(self.running) / 64)
        return self._stats

    def plugin_report(self) -> list[PluginReport]:
        counters = {"tokens": float(self._stats.steps_total), "level_now": 1.0}
        return [PluginReport("fake", "fake-dist", "1.0", ["interlock_counters"], counters)]

    def close(self) -> None:
        self.waiting.clear()
        self.running.clear()


class Script:
    """What one prompt orders."""

    def __init__(self, request: Request, tokenizer: FakeTokenizer) -> None:
        text = tokenizer.decode(request.prompt_token_ids)
        self.orders: dict[str, str] = dict(re.findall(f"!({ORDERS}) ?([\\d.]*)", text))
        said = re.search(r"!say (.*)", text)
        self.said = [*said[1].encode(), EOS] if said else None
        self.random = random.Random(0 if request.params.greedy else request.rng_key)

    def fails_now(self, request: Request) -> bool:
        after = self.orders.get("error-after")
        return after is not None and request.num_output_tokens >= int(after)

    def token(self, request: Request) -> int:
        if "end" in self.orders:
            return EOS
        if self.said is not None:
            place = request.num_output_tokens
            return self.said[place] if place < len(self.said) else EOS
        return self.random.choice(b"abcdefghij klmnop qrstu")


def _logprob(token: int, count: int) -> TokenLogprob:
    top: list[tuple[int, Any]] = [(token, -0.25)] + [
        ((token + i) % VOCAB, -1.0 * i) for i in range(1, count)
    ]
    return TokenLogprob(token, -0.25, 1, top[:count])
