"""The HTTP process's side of the engine: submit, abort, and what state the engine is in."""

from __future__ import annotations

import asyncio
import enum
import time
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from interlock.engine.outputs import EngineInfo, EngineStats, Output
from interlock.errors import EngineDeadError
from interlock.plugins import PluginReport
from interlock.server import wire
from interlock.server.errors import DeadlineError, UnavailableError

DEADLINE_GRACE_S = 5.0


class EngineState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    STUCK = "stuck"
    DEAD = "dead"


class Group:
    """All sequences of one HTTP request, as an async context manager.

    Leaving the context aborts whatever still runs, so a cancelled handler cannot leak work.
    """

    def __init__(self, client: EngineClient, submit: wire.Submit) -> None:
        self._client = client
        self._submit = submit
        self._arrived: list[Output] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.pending = {sequence.id for sequence in submit.sequences}

    async def __aenter__(self) -> Group:
        if self._submit.deadline is not None:
            # The engine enforces deadlines; this one answers when the engine itself hangs.
            delay = self._submit.deadline - time.monotonic() + DEADLINE_GRACE_S
            error = DeadlineError("the deadline passed", code="timeout")
            self._timer = asyncio.get_running_loop().call_later(delay, self.fail, error)
        try:
            await self._client.send_submit(self, self._submit)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._client.release(self, self._submit)

    async def next(self) -> list[Output]:
        """Outputs that have arrived since the last call, at least one.

        Raises RequestError if the engine refused the group, EngineDeadError if it died.
        """
        await self._wake.wait()
        self._wake.clear()
        items, self._arrived = self._arrived, []
        if items:
            if self._error is not None:
                self._wake.set()
            return items
        assert self._error is not None
        raise self._error

    def put(self, outputs: list[Output]) -> None:
        self._arrived += outputs
        self.pending.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake.set()


class EngineClient:
    """Talks to one engine process. Lives on one event loop."""

    def __init__(self, address: str, *, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._groups: dict[str, Group] = {}
        self._by_sequence: dict[str, Group] = {}
        self._last_heard = time.monotonic()
        self.ready = asyncio.Event()
        self.death: str | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.plugins: list[PluginReport] = []

    @property
    def state(self) -> EngineState:
        """`STUCK` when nothing was heard for the stall time: even an idle loop sends heartbeats."""
        if self.death is not None:
            return EngineState.DEAD
        if self.info is None:
            return EngineState.LOADING
        if time.monotonic() - self._last_heard > self._stall_timeout_s:
            return EngineState.STUCK
        return EngineState.READY

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    async def hello(self) -> None:
        await self._send(wire.Hello())

    async def shutdown(self) -> None:
        await self._send(wire.Shutdown())

    async def receive(self) -> None:
        """Distribute what the engine sends until cancelled."""
        try:
            while True:
                message = wire.from_engine.decode(await self._socket.recv())
                self._last_heard = time.monotonic()
                self._handle(message)
        except Exception as error:
            self.fail(f"the engine cannot be understood: {type(error).__name__}: {error}")
            raise

    def submit(self, submit: wire.Submit) -> Group:
        """The group to enter; raises UnavailableError at once if the engine cannot serve it."""
        self.check_available()
        return Group(self, submit)

    def check_available(self) -> None:
        state = self.state
        if state is EngineState.DEAD:
            raise UnavailableError(str(self.death), code="engine_dead")
        if state is EngineState.LOADING:
            raise UnavailableError(
                "the model is being loaded", code="engine_loading", retry_after_s=5
            )
        if state is EngineState.STUCK:
            raise UnavailableError(
                f"the engine has made no progress for {self._stall_timeout_s:g} s",
                code="engine_stuck",
                retry_after_s=10,
            )

    def fail(self, reason: str) -> None:
        """The engine is gone: every group ends with EngineDeadError, also later ones."""
        if self.death is None:
            self.death = reason
            self.stats = _at_rest(self.stats)
        self.end_all(EngineDeadError(self.death))

    def end_all(self, error: Exception) -> None:
        for group in self._groups.values():
            group.fail(error)

    def close(self) -> None:
        self._socket.close()

    async def send_submit(self, group: Group, submit: wire.Submit) -> None:
        self._groups[submit.group] = group
        self._by_sequence.update(dict.fromkeys(group.pending, group))
        await self._send(submit)

    def release(self, group: Group, submit: wire.Submit) -> None:
        self._groups.pop(submit.group, None)
        for sequence in submit.sequences:
            self._by_sequence.pop(sequence.id, None)
        if group.pending and self.death is None:
            self._send_now(wire.Abort(sorted(group.pending)))

    async def _send(self, message: wire.FromClient) -> None:
        await self._socket.send(wire.encoder.encode(message))

    def _send_now(self, message: wire.FromClient) -> None:
        # Called while a handler is being cancelled, where awaiting is not safe. The send
        # itself never blocks: the socket has no high-water mark.
        future = asyncio.ensure_future(self._send(message))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _handle(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Outputs):
            self._distribute(message.items)
        elif isinstance(message, wire.Rejected):
            self._reject(message)
        elif isinstance(message, wire.Stats):
            self.stats, self.plugins = message.stats, message.plugins
        elif isinstance(message, wire.Ready):
            self.info, self.plugins = message.info, message.plugins
            self.ready.set()
        else:
            self.fail(message.message)

    def _distribute(self, outputs: list[Output]) -> None:
        by_group: dict[int, tuple[Group, list[Output]]] = {}
        for output in outputs:
            group = self._by_sequence.get(output.request_id)
            if group is not None:
                by_group.setdefault(id(group), (group, []))[1].append(output)
        for group, items in by_group.values():
            group.put(items)

    def _reject(self, record: wire.Rejected) -> None:
        group = self._groups.get(record.group)
        if group is not None:
            group.pending.clear()
            group.fail(wire.as_error(record))


def _at_rest(stats: EngineStats) -> EngineStats:
    """The totals of an engine that has ended: nothing runs, waits or holds memory any more."""
    return msgspec.structs.replace(stats, running=0, waiting=0, held=0, kv_usage=0.0)
