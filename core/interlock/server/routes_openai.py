"""OpenAI's routes, and vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from sanic import HTTPResponse
from sanic import Request as HTTPRequest
from sanic.response import raw

from interlock.errors import RequestError
from interlock.server import fields, jobs, protocol
from interlock.server.answers import Answer
from interlock.server.auth import offered_key
from interlock.server.body import read_json
from interlock.server.frontend import Frontend
from interlock.server.jobs import Job
from interlock.server.metrics import JobMetrics
from interlock.server.state import ServerState
from interlock.server.streaming import answer_stream, answer_whole

T = TypeVar("T", bound=msgspec.Struct)

MAX_DETOKENIZE = 2**20
"""Ids in one /detokenize request: decoding holds the interpreter's lock."""


def as_json(document: Any) -> HTTPResponse:
    return raw(msgspec.json.encode(document), content_type="application/json")


async def completions(request: HTTPRequest) -> HTTPResponse | None:
    state, body = await _body(request, protocol.CompletionRequest)
    protocol.adopt_request_id(body, request.headers.get("x-request-id"))
    frontend = _frontend(state, body.model)
    job = await jobs.completion_job(body, state.settings, frontend, _arrival(request))
    _separate(request, state, job)
    return await _run(request, state, frontend, job)


async def chat_completions(request: HTTPRequest) -> HTTPResponse | None:
    state, body = await _body(request, protocol.ChatRequest)
    protocol.adopt_request_id(body, request.headers.get("x-request-id"))
    frontend = _frontend(state, body.model)
    job = await jobs.chat_job(body, state.settings, frontend, _arrival(request))
    _separate(request, state, job)
    return await _run(request, state, frontend, job)


def _separate(request: HTTPRequest, state: ServerState, job: Job) -> None:
    """Put the key into the cache's salt: a tenant's own salt separates within its key."""
    if not state.settings.server.salt_by_key:
        return
    digest = hashlib.sha256(offered_key(request) or b"").hexdigest()[:32]
    salt = job.submit.extras.get("cache_salt")
    job.submit.extras["cache_salt"] = digest if salt is None else f"{digest}:{salt}"


async def models(request: HTTPRequest) -> HTTPResponse:
    state: ServerState = request.app.ctx.state
    return as_json({"object": "list", "data": [_model(state)] if state.frontend else []})


async def model(request: HTTPRequest, model_id: str) -> HTTPResponse:
    state: ServerState = request.app.ctx.state
    state.check_model(model_id)
    return as_json(_model(state))


async def tokenize(request: HTTPRequest) -> HTTPResponse:
    state, body = await _body(request, protocol.TokenizeRequest)
    frontend = _frontend(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    ids = await frontend.run(lambda: _tokens(body, frontend))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": frontend.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [frontend.tokenizer.id_to_token(i) for i in ids]
    return as_json(answer)


async def detokenize(request: HTTPRequest) -> HTTPResponse:
    state, body = await _body(request, protocol.DetokenizeRequest)
    frontend = _frontend(state, body.model)
    if len(body.tokens) > MAX_DETOKENIZE:
        raise RequestError(f"tokens holds at most {MAX_DETOKENIZE} ids", param="tokens")
    return as_json({"prompt": await frontend.run(lambda: _text(body, frontend))})


def _text(body: protocol.DetokenizeRequest, frontend: Frontend) -> str:
    frontend.check_ids(body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    return frontend.tokenizer.decode(body.tokens, skip_special_tokens=skip)


def _tokens(body: protocol.TokenizeRequest, frontend: Frontend) -> list[int]:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return frontend.tokenizer.encode(body.prompt, add_special_tokens=special)
    fields.check_depth("tools", body.tools)
    fields.check_depth("chat_template_kwargs", body.chat_template_kwargs)
    prompt = frontend.chat(
        protocol.check_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        tools=body.tools,
        kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
    )
    return prompt.ids


async def _body(request: HTTPRequest, kind: type[T]) -> tuple[ServerState, T]:
    state: ServerState = request.app.ctx.state
    data = await read_json(request, state.settings.server.max_body_bytes)
    return state, fields.decode(data, kind)


def _frontend(state: ServerState, model_name: str | None) -> Frontend:
    frontend = state.ready_frontend()
    state.check_model(model_name)
    return frontend


async def _run(
    request: HTTPRequest, state: ServerState, frontend: Frontend, job: Job
) -> HTTPResponse | None:
    answer = Answer(job, frontend)
    observed = JobMetrics(state.metrics, job)
    request.ctx.job_id = job.id
    state.begin()
    try:
        if not job.body.stream:
            return await answer_whole(state.client, job, answer, observed)
        await answer_stream(request, state.client, job, answer, observed)
        return None
    finally:
        observed.close()
        state.end()


def _model(state: ServerState) -> dict[str, Any]:
    name = state.frontend.model_name if state.frontend else ""
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "interlock",
        "root": name,
        "parent": None,
        "max_model_len": state.frontend.max_model_len if state.frontend else None,
    }


def _arrival(request: HTTPRequest) -> float:
    arrival: float = getattr(request.ctx, "arrival", 0.0) or time.monotonic()
    return arrival


Handler = Callable[..., Coroutine[Any, Any, HTTPResponse | None]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("/v1/completions", "POST", completions),
    ("/v1/chat/completions", "POST", chat_completions),
    ("/v1/models", "GET", models),
    ("/v1/models/<model_id:path>", "GET", model),
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
)
