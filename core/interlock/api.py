"""The embedded API: a model in this process, prompts in, text out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from interlock.engine.engine import Engine
from interlock.engine.outputs import Output, TokenLogprob
from interlock.engine.request import Request, SamplingParams
from interlock.errors import InterlockError
from interlock.settings import load_settings


@attrs.define(slots=True)
class Completion:
    """One finished sequence."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = attrs.field(factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    def add(self, output: Output) -> None:
        """Append what one step produced. Raises InterlockError if the request failed."""
        if output.finish_reason == "error":
            raise InterlockError(output.error or "the request failed")
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class LLM:
    """A loaded model.

    ``LLM("smollm2-135m").generate(["The capital of France is"])`` is all that is needed.
    Keyword arguments are fields of `interlock.settings.EngineSettings`; ``sections`` maps plugin
    names to their settings.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        plugins: Sequence[str] = (),
        sections: dict[str, dict[str, Any]] | None = None,
        **engine: Any,
    ) -> None:
        flags = {f"engine.{key}": value for key, value in {"model": model, **engine}.items()}
        for name, values in (sections or {}).items():
            flags.update({f"{name}.{key}": value for key, value in values.items()})
        self.engine = Engine(load_settings(plugins, flags=flags))
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, batched; results are in their order."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        requests = [self._request(p, s) for p, s in zip(prompts, params, strict=True)]
        done = {r.id: Completion(r.id, r.prompt_token_ids) for r in requests}
        for output in self._run(requests):
            done[output.request_id].add(output)
        return list(done.values())

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Output]:
        """The outputs of one prompt as they come; leaving the loop early cancels it."""
        yield from self._run([self._request(prompt, params or SamplingParams())])

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(f"llm-{next(self._ids)}", ids, params)

    def _run(self, requests: Sequence[Request]) -> Iterator[Output]:
        mine: set[str] = set()
        try:
            for request in requests:
                self.engine.add(request)
                mine.add(request.id)
            while mine:
                for output in self.engine.step():
                    if output.request_id in mine:
                        if output.finish_reason is not None:
                            mine.discard(output.request_id)
                        yield output
        finally:
            for request_id in mine:
                self.engine.abort(request_id)
