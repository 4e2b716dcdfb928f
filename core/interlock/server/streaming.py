"""Server-sent events, and the loop that turns a job into an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sanic import Request as HTTPRequest
from sanic.log import error_logger
from sanic.response import HTTPResponse, raw

from interlock.engine.outputs import Output
from interlock.errors import EngineDeadError, RequestError
from interlock.server.answers import Answer
from interlock.server.client import EngineClient, Group
from interlock.server.errors import as_request_error, error_document
from interlock.server.jobs import Job
from interlock.server.metrics import JobMetrics

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def answer_whole(
    client: EngineClient, job: Job, answer: Answer, metrics: JobMetrics
) -> HTTPResponse:
    """Run the job to its end and answer with one document."""
    async with client.submit(job.submit) as group:
        while not answer.finished:
            for output in await group.next():
                metrics.take(output)
                answer.take(output)
    body = msgspec.json.encode(answer.document())
    return raw(body, content_type="application/json", headers={"x-request-id": job.id})


async def answer_stream(
    request: HTTPRequest, client: EngineClient, job: Job, answer: Answer, metrics: JobMetrics
) -> None:
    """Stream the job. Headers go out with the first output, so earlier errors keep their status.

    A later error becomes one ``data: {"error": …}`` event, after which the stream ends without
    ``[DONE]``: a stream that ends with ``[DONE]`` is complete.
    """
    async with client.submit(job.submit) as group:
        first = _events(await group.next(), answer, metrics)
        headers = {**STREAM_HEADERS, "x-request-id": job.id}
        response = await request.respond(content_type=EVENT_STREAM, headers=headers)
        await response.send(first)
        await response.send(await _rest(response, group, answer, metrics))
        await response.eof()


async def _rest(response: Any, group: Group, answer: Answer, metrics: JobMetrics) -> bytes:
    """Send the events up to the end; returns the closing bytes."""
    try:
        while not answer.finished:
            await response.send(_events(await group.next(), answer, metrics))
    except (RequestError, EngineDeadError) as error:
        return event(error_document(as_request_error(error)))
    except Exception as error:
        error_logger.exception("a stream failed")
        return event(error_document(as_request_error(error)))
    closing = event(answer.usage_chunk()) if answer.job.body.include_usage else b""
    return closing + DONE


def _events(outputs: Iterable[Output], answer: Answer, metrics: JobMetrics) -> bytes:
    parts: list[bytes] = []
    for output in outputs:
        metrics.take(output)
        parts += [event(chunk) for chunk in answer.chunks(output)]
    return b"".join(parts)
