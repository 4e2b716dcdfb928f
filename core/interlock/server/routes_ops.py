"""Routes for operators: life, readiness, metrics, version, plugins."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from sanic import HTTPResponse
from sanic import Request as HTTPRequest
from sanic.response import json, raw, text

from interlock import __version__
from interlock.server.client import EngineState
from interlock.server.metrics import CONTENT_TYPE
from interlock.server.state import ServerState


async def health(request: HTTPRequest) -> HTTPResponse:
    """Live: 200 from the first moment, 503 once the engine process has died."""
    client = _state(request).client
    if client.state is EngineState.DEAD:
        return json({"status": "dead", "reason": client.death}, status=503)
    return json({"status": "ok", "engine": client.state.value})


async def ready(request: HTTPRequest) -> HTTPResponse:
    """200 only when a request sent now would be served."""
    document = _state(request).readiness()
    return json(document, status=200 if document["ready"] else 503)


async def metrics(request: HTTPRequest) -> HTTPResponse:
    return raw(_state(request).metrics.render(), content_type=CONTENT_TYPE)


async def version(_request: HTTPRequest) -> HTTPResponse:
    return json({"version": __version__})


async def plugins(request: HTTPRequest) -> HTTPResponse:
    body = msgspec.json.encode({"plugins": _state(request).client.plugins})
    return raw(body, content_type="application/json")


async def root(_request: HTTPRequest) -> HTTPResponse:
    return text(f"interlock {__version__}: an OpenAI-compatible server; see /v1/models, /ready\n")


def _state(request: HTTPRequest) -> ServerState:
    state: ServerState = request.app.ctx.state
    return state


ROUTES: tuple[tuple[str, str, Callable[..., Coroutine[Any, Any, HTTPResponse]]], ...] = (
    ("/", "GET", root),
    ("/health", "GET", health),
    ("/ready", "GET", ready),
    ("/metrics", "GET", metrics),
    ("/version", "GET", version),
    ("/plugins", "GET", plugins),
)
