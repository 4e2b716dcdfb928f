"""The Sanic application: key check, body limits, errors in OpenAI's shape, request metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import sanic.exceptions
from sanic import HTTPResponse, Sanic
from sanic import Request as HTTPRequest
from sanic.log import error_logger
from sanic.response import empty, raw

from interlock.errors import EngineDeadError, RequestError
from interlock.server import errors, routes_openai, routes_ops
from interlock.server.auth import offered_key
from interlock.server.body import drain
from interlock.server.state import ServerState

A_WEEK_S = 7 * 86400.0
PUBLIC_PATHS = ("/health",)
CLIENT_CLOSED = 499
"""Status in metrics of requests whose client went away before the answer."""

App = Sanic[Any, Any]
Handler = Callable[..., Coroutine[Any, Any, HTTPResponse | None]]


def create_app(state: ServerState) -> App:
    """The application for one HTTP process; plugins may add routes before it listens."""
    app: App = Sanic("interlock", configure_logging=False, env_prefix=None, strict_slashes=True)
    _configure(app, state)
    app.ctx.state = state
    app.register_middleware(_check_key, "request")
    app.register_middleware(_start_clock, "request", priority=10)
    app.error_handler.add(Exception, _answer_error)
    app.add_signal(_count_response, "http.lifecycle.response")
    for route in (*routes_openai.ROUTES, *routes_ops.ROUTES):
        add_route(app, *route)
    return app


def add_route(app: App, path: str, method: str, handler: Handler) -> None:
    """Add ``handler``, and OPTIONS (and HEAD, for GET) beside it."""
    methods = ["GET", "HEAD"] if method == "GET" else [method]
    name = f"{method.lower()}_{path.strip('/').replace('/', '_') or 'root'}"
    name = "".join(c if c.isalnum() else "_" for c in name)
    app.add_route(_counted(handler), path, methods=methods, name=name, stream=method == "POST")
    allow = ", ".join([*methods, "OPTIONS"])

    async def options(_request: HTTPRequest, **_: Any) -> HTTPResponse:
        return empty(headers={"allow": allow})

    app.add_route(options, path, methods=["OPTIONS"], name=f"options_{name}")


def _counted(handler: Handler) -> Handler:
    async def run(request: HTTPRequest, **arguments: Any) -> Any:
        try:
            return await handler(request, **arguments)
        except asyncio.CancelledError:
            _count(request, CLIENT_CLOSED)
            raise

    return run


def _configure(app: App, state: ServerState) -> None:
    app.config.update(
        {
            "MOTD": False,
            "ACCESS_LOG": False,
            "FALLBACK_ERROR_FORMAT": "json",
            "REQUEST_MAX_SIZE": state.settings.server.max_body_bytes,
            # A completion may take as long as it takes: deadlines belong to the request.
            "RESPONSE_TIMEOUT": A_WEEK_S,
            "REQUEST_TIMEOUT": 60,
            "KEEP_ALIVE_TIMEOUT": 75,
        }
    )


async def _start_clock(request: HTTPRequest) -> None:
    if not hasattr(request.ctx, "arrival"):
        request.ctx.arrival = time.monotonic()
        _state(request).metrics.http_started()


async def _check_key(request: HTTPRequest) -> None:
    """Everything but /health asks for the key, routes that do not exist included."""
    server = _state(request).settings.server
    public = (*PUBLIC_PATHS, "/metrics") if server.metrics_without_key else PUBLIC_PATHS
    if server.api_key and request.path not in public and not _has_key(request, server.api_key):
        raise errors.UnauthorizedError(
            "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )


def _has_key(request: HTTPRequest, keys: Iterable[str]) -> bool:
    offered = offered_key(request)
    if offered is None:
        return False
    # Every key is compared in constant time, and all of them: no early exit tells which matched.
    return sum(hmac.compare_digest(offered, key.encode()) for key in keys) > 0


async def _answer_error(request: HTTPRequest, error: Exception) -> HTTPResponse:
    shown = _shown(error)
    if shown.status >= 500 and not isinstance(shown, errors.UnavailableError):
        error_logger.error("%s %s: %s", request.method, request.path, shown.message)
    response = raw(
        errors.error_body(shown),
        status=shown.status,
        content_type="application/json",
        headers=errors.error_headers(shown) | _request_id(request),
    )
    if shown.status == errors.BodyTooLargeError.status:
        await drain(request)
    return response


def _request_id(request: HTTPRequest) -> dict[str, str]:
    """The id that the answer would have had, for the client's report and the server's log."""
    job_id = getattr(request.ctx, "job_id", None)
    return {"x-request-id": job_id} if job_id else {}


def _shown(error: Exception) -> RequestError:
    if isinstance(error, RequestError | EngineDeadError):
        return errors.as_request_error(error)
    if isinstance(error, sanic.exceptions.NotFound):
        return errors.NotFoundError("no such route", code="route_not_found")
    if isinstance(error, sanic.exceptions.MethodNotAllowed):
        text = "method not allowed on this route"
        return errors.MethodNotAllowedError(text, allowed=error.allowed_methods or ())
    if isinstance(error, sanic.exceptions.PayloadTooLarge):
        if "header" in str(error):
            return errors.HeadersTooLargeError("the request's headers are too large")
        return errors.BodyTooLargeError("the request body is too large")
    if isinstance(error, sanic.exceptions.SanicException) and error.status_code < 500:
        shown = RequestError(str(error)[:200] or "bad request")
        shown.status = error.status_code
        return shown
    error_logger.error("unexpected error", exc_info=error)
    return errors.as_request_error(error)


async def _count_response(request: HTTPRequest, response: HTTPResponse) -> None:
    _count(request, response.status)


def _count(request: HTTPRequest, status: int) -> None:
    arrival = getattr(request.ctx, "arrival", None)
    if arrival is None or getattr(request.ctx, "counted", False):
        return
    request.ctx.counted = True
    handler = f"/{request.route.path.strip('/')}" if request.route else "other"
    seconds = time.monotonic() - arrival
    method = request.method if request.method in _METHODS else "other"
    _state(request).metrics.http_finished(handler, method, status, seconds)


_METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")


def _state(request: HTTPRequest) -> ServerState:
    state: ServerState = request.app.ctx.state
    return state
