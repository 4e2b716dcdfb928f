"""The API key of an HTTP request."""

from __future__ import annotations

from sanic import Request as HTTPRequest


def offered_key(request: HTTPRequest) -> bytes | None:
    """What a request gives as its bearer token, right or wrong; None if it gives none."""
    scheme, _, given = (request.headers.getone("authorization", "") or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    return given.strip().encode("utf-8", "surrogateescape")
