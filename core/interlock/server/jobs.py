"""One generating HTTP request, from its body to the group that the engine is given."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from typing import Any

import attrs
import msgspec

from interlock.engine.request import SamplingParams
from interlock.errors import RequestError
from interlock.server import protocol, wire
from interlock.server.fields import Int
from interlock.server.frontend import Frontend, Prompt
from interlock.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from interlock.settings import Settings


@attrs.frozen
class Job:
    """A request that is ready to run: ``submit.sequences[i]`` is choice ``i`` of the answer."""

    id: str
    created: int
    body: GenerationRequest
    chat: bool
    prompts: list[Prompt]
    n: int
    submit: wire.Submit

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that choice ``index`` continues."""
        return self.prompts[index // self.n]


async def completion_job(
    body: CompletionRequest, settings: Settings, frontend: Frontend, arrival: float
) -> Job:
    """Validate and tokenize a /v1/completions body. Raises RequestError."""
    params = protocol.completion_params(body, frontend.vocab_size)
    check_count("n", _n(body), settings.server.max_n)
    prompts = await frontend.run(lambda: _completion_prompts(body, settings, frontend))
    return _job(body, settings, frontend, params, prompts, arrival)


async def chat_job(
    body: ChatRequest, settings: Settings, frontend: Frontend, arrival: float
) -> Job:
    """Validate, render and tokenize a /v1/chat/completions body. Raises RequestError."""
    params = protocol.chat_params(body, frontend.vocab_size)
    check_count("n", _n(body), settings.server.max_n)
    messages = protocol.check_messages(body.messages)
    prompt = await frontend.run(lambda: _chat_prompt(body, messages, frontend))
    return _job(body, settings, frontend, params, [prompt], arrival)


def check_count(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise RequestError(f"{name} must be between 1 and {limit}, not {value}", param=name)


def _check_prompts(count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"prompt holds {count} prompts; at most {limit}", param="prompt")


def _n(body: GenerationRequest) -> int:
    return 1 if body.n is None else body.n


def _job(
    body: GenerationRequest,
    settings: Settings,
    frontend: Frontend,
    params: SamplingParams,
    prompts: list[Prompt],
    arrival: float,
) -> Job:
    chat = isinstance(body, ChatRequest)
    name = "messages" if chat else "prompt"
    prompts = [_truncated(prompt, body.truncate_prompt_tokens, frontend) for prompt in prompts]
    for prompt in prompts:
        _check_length(name, prompt, params, frontend.max_model_len)
    _check_total(len(prompts) * _n(body), settings)
    unique = uuid.uuid4().hex
    job_id = ("chatcmpl-" if chat else "cmpl-") + (body.request_id or unique)
    submit = wire.Submit(
        group=unique,
        prompts=[prompt.ids for prompt in prompts],
        sequences=_sequences(unique, prompts, _n(body)),
        params=params,
        priority=body.priority or 0,
        deadline=_deadline(body, settings, arrival),
        arrival=arrival,
        extras=protocol.plugin_options(body, settings.plugins),
    )
    return Job(job_id, int(time.time()), body, chat, prompts, _n(body), submit)


def _sequences(group: str, prompts: list[Prompt], n: int) -> list[wire.Sequence]:
    # Equal prompts in one list draw from different random streams; a prompt's own stream
    # does not depend on where in the list it stands.
    seen: Counter[tuple[int, ...]] = Counter()
    sequences = []
    for index, prompt in enumerate(prompts):
        key = tuple(prompt.ids)
        first = seen[key] * n
        seen[key] += 1
        sequences += [wire.Sequence(f"{group}-{index * n + k}", index, first + k) for k in range(n)]
    return sequences


def _deadline(body: GenerationRequest, settings: Settings, arrival: float) -> float | None:
    limits = [s for s in (body.timeout_s, settings.engine.request_timeout_s) if s is not None]
    return arrival + min(limits) if limits else None


def _truncated(prompt: Prompt, keep: int | None, frontend: Frontend) -> Prompt:
    if keep is None or len(prompt.ids) <= keep:
        return prompt
    ids = prompt.ids[-keep:]
    text = frontend.tokenizer.decode(ids, skip_special_tokens=True)
    return attrs.evolve(prompt, ids=ids, text=text)


def _check_length(name: str, prompt: Prompt, params: SamplingParams, max_model_len: int) -> None:
    if not prompt.ids:
        raise RequestError(f"{name}: the prompt has no tokens", param=name)
    room = max_model_len if params.max_tokens == 0 else max_model_len - 1
    if len(prompt.ids) > room:
        raise RequestError(
            f"the prompt has {len(prompt.ids)} tokens; the context of {max_model_len} tokens "
            f"leaves room for {room}",
            param=name,
            code="context_length_exceeded",
        )


def _check_total(sequences: int, settings: Settings) -> None:
    limit = settings.engine.max_waiting + settings.engine.max_num_seqs
    if sequences > limit:
        raise RequestError(
            f"n times the number of prompts is {sequences}; the queue holds {limit}", param="n"
        )


def _chat_prompt(body: ChatRequest, messages: list[dict[str, Any]], frontend: Frontend) -> Prompt:
    return frontend.chat(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=body.tools,
        kwargs=body.chat_template_kwargs,
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else None,
        effort=body.reasoning_effort,
        add_special_tokens=bool(body.add_special_tokens),
        truncate=body.truncate_prompt_tokens,
    )


def _completion_prompts(
    body: CompletionRequest, settings: Settings, frontend: Frontend
) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt, body, frontend)]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("it is missing or empty")
    if isinstance(prompt[0], int):
        return [_id_prompt(prompt, "prompt", body, frontend)]
    _check_prompts(len(prompt), settings.server.max_prompts)
    if all(isinstance(item, str) for item in prompt):
        return [_text_prompt(item, body, frontend) for item in prompt]
    return [_id_prompt(ids, f"prompt[{i}]", body, frontend) for i, ids in enumerate(prompt)]


def _text_prompt(text: str, body: CompletionRequest, frontend: Frontend) -> Prompt:
    return frontend.encode(
        text,
        add_special_tokens=body.add_special_tokens is not False,
        truncate=body.truncate_prompt_tokens,
    )


def _id_prompt(given: Any, place: str, body: CompletionRequest, frontend: Frontend) -> Prompt:
    try:
        ids = msgspec.convert(given, list[Int])
    except msgspec.ValidationError:
        raise _bad_prompt(f"{place} must be a list of token ids") from None
    frontend.check_ids(ids)
    # Only what may run is worth decoding: the text is for echo alone.
    skip = body.skip_special_tokens is not False
    text = frontend.tokenizer.decode(ids, skip_special_tokens=skip) if body.echo else ""
    return Prompt(ids, text)


def _bad_prompt(reason: str) -> RequestError:
    return RequestError(
        f"prompt must be a string, a list of strings, a list of token ids or a list of such "
        f"lists: {reason}",
        param="prompt",
    )
