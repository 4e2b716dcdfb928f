"""Reading request bodies within bounds."""

from __future__ import annotations

import asyncio
import time

from sanic import Request as HTTPRequest
from sanic.http import Http

from interlock.server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

DRAIN_BYTES = 256 * 2**20
DRAIN_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""Longest pause between two parts of a body."""


async def read_json(request: HTTPRequest, limit: int) -> bytes:
    """The body. Raises MediaTypeError unless it is JSON, BodyTooLargeError above ``limit``."""
    _check_type(request.headers.getone("content-type", "") or "")
    _check_size(_declared(request), limit)
    parts: list[bytes] = []
    size = 0
    while (part := await _read_in_time(request)) is not None:
        size += len(part)
        _check_size(size, limit)
        parts.append(part)
    _listen(request)
    return b"".join(parts)


async def drain(request: HTTPRequest) -> None:
    """Read and drop a refused body, within bounds.

    Closing a socket with unread data resets it, and the client would never see the answer.
    """
    http = request.stream
    if not isinstance(http, Http):
        return
    if http.expecting_continue:
        # The client waits for a word before it sends: the answer is that word.
        http.expecting_continue = False
        return
    http.request_max_size = DRAIN_BYTES
    end = time.monotonic() + DRAIN_SECONDS
    left = DRAIN_BYTES
    while left > 0 and time.monotonic() < end:
        try:
            part = await asyncio.wait_for(_read(request), DRAIN_SECONDS)
        except Exception:
            return
        if part is None:
            return
        left -= len(part)


async def _read_in_time(request: HTTPRequest) -> bytes | None:
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await _read(request)
    except TimeoutError:
        raise BodyTimeoutError("the rest of the body did not arrive", code="timeout") from None


async def _read(request: HTTPRequest) -> bytes | None:
    http = request.stream
    if not isinstance(http, Http) or not http.request_body:
        return None
    return await http.read()


def _declared(request: HTTPRequest) -> int:
    text = request.headers.getone("content-length", "0") or "0"
    return int(text) if text.isdigit() else 0


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLargeError(
            f"the body is larger than {limit} bytes (setting server.max_body_bytes)",
            code="body_too_large",
        )


def _check_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise MediaTypeError(
            "the body must be JSON, with the header 'Content-Type: application/json'",
            code="unsupported_media_type",
        )


def _listen(request: HTTPRequest) -> None:
    # Sanic pauses reading when its buffer fills; a paused socket does not notice that the
    # client has gone, and the generation would run on.
    resume = getattr(request.transport, "resume_reading", None)
    if resume is not None:
        resume()
