"""Errors of the HTTP layer, and their answer in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from interlock.errors import EngineDeadError, QueueFullError, RequestError

MAX_MESSAGE = 2000
"""Characters of a message that reach the client: an answer never echoes a whole input."""


class UnauthorizedError(RequestError):
    """The key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class NotFoundError(RequestError):
    """No such route or model."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(RequestError):
    """``allowed`` lists the methods of the route."""

    status = 405

    def __init__(self, message: str, *, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = sorted(allowed)


class BodyTimeoutError(RequestError):
    status = 408


class BodyTooLargeError(RequestError):
    status = 413


class MediaTypeError(RequestError):
    status = 415


class HeadersTooLargeError(RequestError):
    status = 431


class ServerFaultError(RequestError):
    """The engine failed on this request; the fault is the server's."""

    status = 500
    kind = "server_error"


class UnavailableError(RequestError):
    """The engine is loading, stuck, dead or stopping; ``retry_after_s`` if waiting helps."""

    status = 503
    kind = "service_unavailable"

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The deadline passed before the first token."""

    status = 504
    kind = "timeout_error"


def as_request_error(error: Exception) -> RequestError:
    """Any exception as one that can be shown; unknown ones keep their text to themselves."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return UnavailableError(str(error), code="engine_dead")
    return ServerFaultError("internal error; the server's log has the details", code="internal")


def error_document(error: RequestError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}`` with a bounded message."""
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " … (shortened)"
    return {
        "error": {
            "message": message,
            "type": error.kind,
            "param": error.param[:200] if error.param else None,
            "code": error.code,
        }
    }


def error_body(error: RequestError) -> bytes:
    return msgspec.json.encode(error_document(error))


def error_headers(error: RequestError) -> dict[str, str]:
    """``Retry-After`` in whole seconds where waiting helps, ``WWW-Authenticate``, ``Allow``."""
    if isinstance(error, UnauthorizedError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, MethodNotAllowedError):
        return {"allow": ", ".join(error.allowed)}
    if isinstance(error, QueueFullError | UnavailableError) and error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}
