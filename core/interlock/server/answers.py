"""What a job answers: choices that grow with the engine's outputs, as one document or chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from interlock.engine.outputs import Output, TokenLogprob
from interlock.server.errors import DeadlineError, ServerFaultError, UnavailableError
from interlock.server.frontend import Frontend
from interlock.server.jobs import Job
from interlock.server.logprobs import (
    LegacyLogprobs,
    chat_logprobs,
    join_legacy,
    prompt_logprobs,
)
from interlock.server.protocol import CompletionRequest


class Choice:
    """One sequence of the answer. ``take`` turns an output into the fields of a chunk."""

    def __init__(self, job: Job, index: int, frontend: Frontend) -> None:
        self.job = job
        self.index = index
        self.frontend = frontend
        self.text = ""
        self.token_ids: list[int] = []
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.last: Output | None = None
        self.started = False
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.logprob_parts: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        hidden = frontend.tokenizer.special_ids if job.submit.params.skip_special_tokens else ()
        make = job.prompt_of(index).parser if job.chat else None
        params = job.submit.params
        self.parser = make and make(
            stops=params.stop, include_stop=params.include_stop_str_in_output
        )
        self._legacy = LegacyLogprobs(frontend.token_text, frozenset(hidden))

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        return self._reason(self.last)

    def _reason(self, output: Output | None) -> str | None:
        reason = output.finish_reason if output else None
        return "tool_calls" if reason == "stop" and self.parser and self.parser.calls else reason

    @property
    def reasoning_tokens(self) -> int:
        return self.parser.reasoning_tokens if self.parser else 0

    def take(self, output: Output) -> dict[str, Any]:
        """Fields of the next chunk of this choice. Raises RequestError if it failed."""
        self._check(output)
        first, self.started, self.last = not self.started, True, output
        self.text += output.text
        self.token_ids += output.token_ids
        self.num_output_tokens = max(output.num_output_tokens, len(self.token_ids))
        self.num_cached_tokens = max(output.num_cached_tokens, self.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        fields = self._chat_fields(output) if self.job.chat else self._text_fields(output, first)
        if first and self.job.body.prompt_logprobs is not None and self.prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs()
        self._add_extras(fields, output.token_ids, first)
        return fields

    def document(self) -> dict[str, Any]:
        """The finished choice as it stands in an answer that is not streamed."""
        fields = self._chat_document() if self.job.chat else self._text_document()
        if self.job.body.prompt_logprobs is not None and self.prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs()
        self._add_extras(fields, self.token_ids, first=True)
        return fields

    def _check(self, output: Output) -> None:
        reason = output.finish_reason
        if reason == "error":
            text = output.error or "the engine failed"
            raise ServerFaultError(f"request {self.job.id}: {text}", code="engine_error")
        if reason == "abort":
            raise UnavailableError(f"request {self.job.id} was aborted", code="aborted")
        if reason == "timeout" and output.num_output_tokens == 0 and not self.token_ids:
            raise DeadlineError("the deadline passed before the first token", code="timeout")

    def _head(self, output: Output | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "finish_reason": self._reason(output),
            "stop_reason": output.stop_reason if output else None,
        }

    def _chat_fields(self, output: Output) -> dict[str, Any]:
        entries = output.logprobs or []
        self.logprobs += entries
        shown = chat_logprobs(entries, self.frontend.token_text) if entries else None
        delta = {"content": output.text}
        if self.parser:
            delta = self.parser.push(output.token_ids, final=output.finish_reason is not None)
        return {**self._head(output), "delta": delta, "logprobs": shown}

    def _chat_document(self) -> dict[str, Any]:
        wanted = self.job.submit.params.logprobs is not None
        shown = chat_logprobs(self.logprobs, self.frontend.token_text) if wanted else None
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.parser:
            message |= _parsed(self.parser)
        return {**self._head(self.last), "message": message, "logprobs": shown}

    def _text_fields(self, output: Output, first: bool) -> dict[str, Any]:
        text, parts = output.text, []
        wanted = self.job.submit.params.logprobs is not None
        if first and self._echo:
            text = self.job.prompt_of(self.index).text + text
            parts += [self._echo_logprobs()] if wanted else []
        if wanted and output.logprobs:
            parts.append(self._legacy.rows(output.token_ids, output.logprobs))
        self.logprob_parts += parts
        shown = join_legacy(parts) if parts else None
        return {**self._head(output), "text": text, "logprobs": shown}

    def _text_document(self) -> dict[str, Any]:
        wanted = self.job.submit.params.logprobs is not None
        shown = join_legacy(self.logprob_parts) if wanted else None
        prompt = self.job.prompt_of(self.index).text if self._echo else ""
        return {**self._head(self.last), "text": prompt + self.text, "logprobs": shown}

    @property
    def _echo(self) -> bool:
        return isinstance(self.job.body, CompletionRequest) and bool(self.job.body.echo)

    def _echo_logprobs(self) -> dict[str, Any]:
        ids = self.job.prompt_of(self.index).ids
        entries = self.prompt_logprobs or [None] * len(ids)
        return self._legacy.rows(ids, entries)

    def _prompt_logprobs(self) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self.prompt_logprobs or [], self.frontend.token_text)

    def _add_extras(self, fields: dict[str, Any], token_ids: list[int], first: bool) -> None:
        if self.job.body.return_token_ids:
            fields["token_ids"] = token_ids
            if first:
                fields["prompt_token_ids"] = self.job.prompt_of(self.index).ids
        if self.job.body.return_metrics and self.finished:
            fields["metrics"] = self._metrics()

    def _metrics(self) -> dict[str, Any]:
        timings = self.last.timings if self.last else None
        times = (
            {f"{name}_s": v for name, v in msgspec.structs.asdict(timings).items()}
            if (timings)
            else {}
        )
        stats = (self.last.stats if self.last else None) or {}
        return {**times, "cached_tokens": self.num_cached_tokens, "plugins": stats}


class Answer:
    """All choices of a job, and the documents that the client gets."""

    def __init__(self, job: Job, frontend: Frontend) -> None:
        self.job = job
        self.choices = [Choice(job, i, frontend) for i in range(len(job.submit.sequences))]
        self._by_id = {
            sequence.id: choice
            for sequence, choice in zip(job.submit.sequences, self.choices, strict=True)
        }
        self._head = {
            "id": job.id,
            "created": job.created,
            "model": frontend.model_name,
            "system_fingerprint": frontend.fingerprint or None,
        }

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def take(self, output: Output) -> None:
        self._by_id[output.request_id].take(output)

    def document(self) -> dict[str, Any]:
        kind = "chat.completion" if self.job.chat else "text_completion"
        choices = [choice.document() for choice in self.choices]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """The chunks that ``output`` becomes: in a chat, a choice's first one carries the role."""
        choice = self._by_id[output.request_id]
        first = not choice.started
        fields = choice.take(output)
        chunks = [self._chunk([fields])] if _says_something(fields) else []
        if first and self.job.chat:
            chunks.insert(0, self._chunk([_role(choice.index)]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The one chunk without choices that ``include_usage`` asks for."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts: each prompt once, however many choices continue it."""
        job = self.job
        prompt = sum(len(p.ids) for p in job.prompts)
        completion = sum(choice.num_output_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens for choice in self.choices[:: job.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        if not any(choice.parser for choice in self.choices):
            return {}
        thought = sum(choice.reasoning_tokens for choice in self.choices)
        return {"completion_tokens_details": {"reasoning_tokens": thought}}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.job.body
        kind = "chat.completion.chunk" if self.job.chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if body.continuous_usage:
            chunk["usage"] = self.usage()
        elif body.include_usage:
            chunk["usage"] = None
        return chunk


def _parsed(parser: Any) -> dict[str, Any]:
    """The parts of a message that a parser has found."""
    parts: dict[str, Any] = {"content": parser.content or (None if parser.calls else "")}
    if parser.reasoning:
        parts["reasoning_content"] = parser.reasoning
    if parser.calls:
        parts["tool_calls"] = parser.calls
    return parts


def _says_something(fields: dict[str, Any]) -> bool:
    """Tags alone make no chunk."""
    shown = ("finish_reason", "logprobs", "token_ids", "prompt_logprobs")
    return bool(fields.get("delta", True)) or any(fields.get(name) for name in shown)


def _role(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
