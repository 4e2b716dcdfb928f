"""Records between the HTTP process and the engine process: msgpack over ZeroMQ.

Times are ``time.monotonic()`` of one machine, which its processes share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from interlock.engine.outputs import EngineInfo, EngineStats, Output
from interlock.engine.request import SamplingParams
from interlock.errors import QueueFullError, RequestError
from interlock.plugins import PluginReport


class Sequence(msgspec.Struct, array_like=True):
    """One sequence of a group: which prompt it continues and which random stream it draws from."""

    id: str
    prompt: int
    stream: int


class Submit(msgspec.Struct, tag=True):
    """All sequences of one HTTP request; they are accepted or refused together."""

    group: str
    prompts: list[list[int]]
    sequences: list[Sequence]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0
    extras: dict[str, Any] = {}


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class Hello(msgspec.Struct, tag=True):
    """First message of a client: the engine answers it with `Ready`, once loaded."""


class Shutdown(msgspec.Struct, tag=True):
    """The engine process closes the engine and exits with 0."""


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo
    plugins: list[PluginReport] = []


class Outputs(msgspec.Struct, tag=True):
    items: list[Output]


class Rejected(msgspec.Struct, tag=True):
    """Why a whole group was refused: the fields of a `RequestError`."""

    group: str
    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class Stats(msgspec.Struct, tag=True):
    """Heartbeat: sent at least once a second by a loop that makes progress."""

    stats: EngineStats
    plugins: list[PluginReport] = []


class Failed(msgspec.Struct, tag=True):
    """The engine cannot load, or its loop has ended: one line for the user."""

    message: str


FromClient = Submit | Abort | Hello | Shutdown
FromEngine = Ready | Outputs | Rejected | Stats | Failed

encoder = msgspec.msgpack.Encoder()
from_client = msgspec.msgpack.Decoder(FromClient)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def rejected(group: str, error: RequestError) -> Rejected:
    return Rejected(
        group,
        error.message,
        status=error.status,
        kind=error.kind,
        param=error.param,
        code=error.code,
        retry_after_s=getattr(error, "retry_after_s", None),
    )


def as_error(record: Rejected) -> RequestError:
    """The error that `rejected` was made from, for the HTTP side to raise."""
    if record.status == QueueFullError.status:
        return QueueFullError(record.message, retry_after_s=record.retry_after_s or 1.0)
    error = RequestError(record.message, param=record.param, code=record.code)
    error.status, error.kind = record.status, record.kind
    return error
