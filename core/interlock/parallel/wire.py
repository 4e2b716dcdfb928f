"""What rank 0 and the other ranks say to each other: length-prefixed msgspec frames on a socket.

No pickle: a frame can at worst be refused. The step's tensors never come this way; they are built
on each rank from the rows' numbers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

import msgspec

from interlock.engine.batch import Plan

MAX_FRAME = 1 << 28


class RowData(msgspec.Struct, array_like=True):
    """A `Row` without its request: what a batch is built from, on any rank."""

    token_ids: list[int]
    start: int
    num_logits: int
    is_prefilling: bool
    draft_tokens: list[int]
    block_table: list[int]
    state_slot: int | None
    exports: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def request(self) -> RowData:
        """Where a batch looks for the block table and the slot."""
        return self


class Hello(msgspec.Struct, tag=True):
    """First frame of a worker."""

    token: str
    rank: int


class Load(msgspec.Struct, tag=True):
    """First frame to a worker: the settings' values, and where the collectives meet."""

    plugins: list[str]
    values: dict[str, Any]
    size: int
    port: int | None


class Step(msgspec.Struct, tag=True):
    step: int
    rows: list[RowData]
    copies: list[tuple[int, int]]
    state_copies: list[tuple[int, int]]
    taps: list[int]


class Settle(msgspec.Struct, tag=True):
    """How many tokens of each verify row count."""

    kept: list[int]


class Stop(msgspec.Struct, tag=True):
    pass


class Failed(msgspec.Struct, tag=True):
    """Last frame of a worker that cannot go on, in one line."""

    text: str


ToWorker = Load | Step | Settle | Stop
FromWorker = Hello | Failed
_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def step_of(plan: Plan, taps: tuple[int, ...]) -> Step:
    """The frame that makes other ranks compute ``plan``."""
    rows = [
        RowData(
            row.token_ids,
            row.start,
            row.num_logits,
            row.is_prefilling,
            row.draft_tokens,
            row.request.block_table,
            row.request.state_slot,
            row.exports,
        )
        for row in plan.rows
    ]
    return Step(plan.step, rows, plan.copies, plan.state_copies, list(taps))


def plan_of(step: Step) -> Plan:
    """A plan over row data; it runs like the original."""
    rows: list[Any] = list(step.rows)
    return Plan(step.step, rows, step.copies, step.state_copies)


class Channel:
    """One end of a connection. A peer that has gone is an `EOFError`, whatever the socket says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        data = _encoder.encode(message)
        try:
            self.sock.sendall(struct.pack("<I", len(data)) + data)
        except OSError as error:
            raise EOFError(str(error)) from error

    def from_rank_0(self) -> ToWorker:
        return _to_worker.decode(self._frame())

    def from_worker(self) -> FromWorker:
        return _from_worker.decode(self._frame())

    def _frame(self) -> bytes:
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > MAX_FRAME:
            raise EOFError(f"a frame of {size} bytes is no message of ours")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            try:
                part = self.sock.recv(min(missing, 1 << 20))
            except OSError as error:
                raise EOFError(str(error)) from error
            if not part:
                raise EOFError("the connection was closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        # Wakes a thread that reads here, which closing alone would not.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
