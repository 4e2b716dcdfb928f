"""A model without weights for the commands that generate: one token per character."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from interlock.cli.runtime import Runtime
from interlock.engine.outputs import Output
from interlock.engine.request import Request
from interlock.settings import EngineSettings, Settings


class FakeTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]


class FakeEngine:
    """Answers each prompt with ``reply(prompt text)``, one character per step."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.tokenizer = FakeTokenizer()
        self.info = SimpleNamespace(model_name="fake")
        self.running: dict[str, tuple[Request, str]] = {}
        self.aborted: list[str] = []
        self.prompts: list[str] = []
        self.requests: list[Request] = []
        self.on_step: Callable[[], None] = lambda: None
        self.error: str | None = None
        self.closed = False

    def add(self, request: Request) -> None:
        prompt = "".join(chr(i) for i in request.prompt_token_ids)
        self.prompts.append(prompt)
        self.requests.append(request)
        self.running[request.id] = (request, self.reply(prompt))

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Output]:
        self.on_step()
        return [self._advance(name) for name in list(self.running)]

    def _advance(self, name: str) -> Output:
        request, rest = self.running[name]
        if name in self.aborted or self.error:
            del self.running[name]
            return Output(name, finish_reason="error" if self.error else "abort", error=self.error)
        self.running[name] = (request, rest[1:])
        reason = "stop" if len(rest) <= 1 else None
        if reason:
            del self.running[name]
        prompt_tokens = request.num_prompt_tokens
        return Output(
            name, [ord(rest[0])], rest[0], finish_reason=reason, num_prompt_tokens=prompt_tokens
        )

    def abort(self, request_id: str) -> bool:
        if request_id in self.running:
            self.aborted.append(request_id)
            return True
        return False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """The engine that `generate` and `chat` will get; it shouts back what it is asked."""
    fake = FakeEngine(lambda prompt: prompt.upper())
    files = SimpleNamespace(name="fake-model", kind="gguf")
    settings = Settings(engine=EngineSettings())

    @contextmanager
    def runtime(*_: Any) -> Iterator[Runtime]:
        yield Runtime(settings, files, fake)  # type: ignore[arg-type]

    for command in ("generate", "chat"):
        monkeypatch.setattr(f"interlock.cli.{command}.runtime", runtime)
        monkeypatch.setattr(f"interlock.cli.{command}.model_files", lambda _: (settings, files))
    return fake
