"""`run_server`: one HTTP process, one engine process, from the free port to the clean end.

Exit status: 0 after SIGTERM or SIGINT, also while loading; 1 if the engine process died while
serving; 128 + signal number when a second signal ends everything at once. A start that fails
raises the error to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from interlock.errors import ConfigError, InterlockError
from interlock.plugins import Plugins
from interlock.server.app import App, create_app
from interlock.server.client import EngineClient
from interlock.server.engine_process import load_object
from interlock.server.errors import UnavailableError
from interlock.server.frontend import Frontend
from interlock.server.metrics import Metrics
from interlock.server.state import SHUTTING_DOWN, ServerState
from interlock.server.supervisor import EngineProcess
from interlock.settings import Settings

BACKLOG = 2048
FLUSH_S = 2.0
"""Time for answers, and the last events of cut-off streams, to leave the process."""

DEFAULT_ENGINE = "interlock.engine.engine:Engine"
DEFAULT_FRONTEND = "interlock.server.frontend:load_frontend"

T = TypeVar("T")


class StartError(InterlockError):
    """The server cannot start; the message says why in one line."""


def run_server(
    settings: Settings, *, engine: str = DEFAULT_ENGINE, frontend: str = DEFAULT_FRONTEND
) -> int:
    """Serve until a signal; returns the exit status of this module's description.

    ``engine`` and ``frontend`` name their factories as ``module:callable`` (tests use doubles);
    both are called with the settings, ``engine`` in the engine process and with ``progress`` too.
    Raises InterlockError if the start fails: a busy port is found before anything is loaded.
    """
    if settings.server.http_workers != 1:
        raise ConfigError("server.http_workers: only 1 HTTP process is supported")
    listener = bind(settings.server.host, settings.server.port)
    if not settings.server.api_key and not _is_loopback(listener):
        say("warning: anybody who reaches this address may use it; set server.api_key")
    _raise_file_limit()
    # On a terminal Sanic would recommend flags that this program does not have.
    os.environ.setdefault("SANIC_IGNORE_PRODUCTION_WARNING", "true")
    server = Server(settings, listener, engine, frontend)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError naming host and port."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may bind one port; only one may listen. So listen now, not after loading.
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "--host" if wrong_host else "--port"
        reason = error.strerror or str(error)
        raise StartError(
            f"cannot listen on {host} port {port}: {reason}; choose another with {flag}"
        ) from None
    listener.setblocking(False)
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class Server:
    """The life of one server: start, serve, drain, end."""

    def __init__(
        self, settings: Settings, listener: socket.socket, engine: str, frontend: str
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._frontend_factory = frontend
        self._engine = EngineProcess(settings, engine)
        self._stop = asyncio.Event()
        self._signals = 0
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        client = EngineClient(
            self._engine.address, stall_timeout_s=self._settings.server.stall_timeout_s
        )
        state = ServerState(self._settings, client, Metrics(client))
        try:
            return await self._serve(state)
        finally:
            await self._end(client)

    async def _serve(self, state: ServerState) -> int:
        server = await self._listen(create_app(state))
        await self._engine.start()
        self._task(state.client.receive())
        exit_watch = self._task(self._engine.wait())
        start = self._task(self._start(state))
        stop = self._task(self._stop.wait())
        await asyncio.wait({exit_watch, start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            await self._check_started(state, start, exit_watch)
            await asyncio.wait({exit_watch, stop}, return_when=asyncio.FIRST_COMPLETED)
        if exit_watch.done() and not stop.done():
            await self._engine_died(state, exit_watch.result())
            await asyncio.wait({stop}, timeout=self._settings.server.exit_after_s)
        died = state.client.death is not None
        await self._drain(state)
        await _flush(server)
        server.close()
        if state.frontend is not None:
            state.frontend.close()
        return int(died)

    async def _listen(self, app: App) -> Any:
        plugins = Plugins.load(self._settings.plugins)
        plugins.each("interlock_routes", app=app)
        server: Any = await app.create_server(
            sock=self._listener, backlog=BACKLOG, asyncio_server_kwargs={"start_serving": False}
        )
        await server.startup()
        await server.before_start()
        await server.start_serving()
        await server.after_start()
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"listening on http://{shown}:{port} (pid {os.getpid()})")
        return server

    async def _start(self, state: ServerState) -> None:
        """Read tokenizer and template, let the engine load, then open for prompts."""
        say(f"loading {self._settings.engine.model}")
        factory: Callable[[Settings], Frontend] = load_object(self._frontend_factory)
        frontend = await in_daemon_thread(lambda: factory(self._settings))
        await in_daemon_thread(lambda: frontend.longest_token)
        if frontend.template is None and frontend.native is None:
            say("warning: the model has no chat template; /v1/chat/completions answers 400")
        await state.client.hello()
        await state.client.ready.wait()
        info = state.client.info
        assert info is not None
        frontend.open(info, self._settings.engine.max_waiting)
        state.metrics.named(frontend.model_name)
        state.frontend = frontend
        say(f"ready: {frontend.model_name}, {info.dtype} on {info.device}")

    async def _check_started(
        self, state: ServerState, start: asyncio.Task[None], exit_watch: asyncio.Task[str]
    ) -> None:
        """Raise if the start failed, here or in the engine process."""
        if start.done():
            _check(start)
            return
        # The engine's own reason may still be on its way through the socket.
        await asyncio.sleep(0.1)
        if state.client.death is not None:
            raise StartError(state.client.death)
        raise StartError(f"the engine process ended while loading: {exit_watch.result()}")

    async def _engine_died(self, state: ServerState, how: str) -> None:
        await asyncio.sleep(0.1)
        state.client.fail(f"the engine process has ended: {how}")
        rest = self._settings.server.exit_after_s
        say(f"error: {state.client.death}; answering 503 for {rest:g} s, then exiting")

    async def _drain(self, state: ServerState) -> None:
        """Let running requests finish within the limit; end the others with an error."""
        state.draining = True
        if not state.generating:
            return
        limit = self._settings.server.shutdown_timeout_s
        say(f"stopping: {state.generating} requests have {limit:g} s to finish")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.idle.wait(), limit)
            return
        state.client.end_all(UnavailableError(SHUTTING_DOWN, code="shutting_down"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.idle.wait(), FLUSH_S)

    async def _end(self, client: EngineClient) -> None:
        self._listener.close()
        if client.info is not None and client.death is None:
            await client.shutdown()
            await self._engine.stop()
        self._engine.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        client.close()
        self._engine.clean()

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
            return
        self._engine.kill()
        self._engine.clean()
        os._exit(128 + number)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task


def _check(start: asyncio.Task[None]) -> None:
    try:
        start.result()
    except InterlockError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise StartError(f"the server cannot start: {type(error).__name__}: {error}") from None


async def _flush(server: Any) -> None:
    """Wait, within bounds, until what was answered has left the write buffers."""
    end = time.monotonic() + FLUSH_S
    while time.monotonic() < end and any(
        connection.transport is not None and connection.transport.get_write_buffer_size()
        for connection in server.connections
    ):
        await asyncio.sleep(0.02)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """``work`` in a thread that never delays the end of the process (a download, say)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="start", daemon=True).start()
    return await future


def say(text: str) -> None:
    print(f"interlock: {text}", file=sys.stderr, flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _raise_file_limit() -> None:
    """Each connection is an open file; the usual soft limit of 1,024 is few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
