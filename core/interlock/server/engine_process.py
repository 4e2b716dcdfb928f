"""The engine process: one engine, one socket, one loop.

Started by `interlock.server.supervisor` with a `Launch` on its standard input, which stays open
as a lifeline: end of file there means that the server is gone, and this process goes too.

Exit status: 0 after `Shutdown`; 1 if the engine cannot be built; 3 if its loop raised.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import zmq

from interlock.cli.console import progress_bars
from interlock.engine.outputs import Output
from interlock.engine.request import Request
from interlock.errors import InterlockError, RequestError
from interlock.server import wire
from interlock.settings import Settings
from interlock.waiting import limit_spinning

HEARTBEAT_S = 0.5
EXIT_LOAD_FAILED = 1
EXIT_LOOP_FAILED = 3
EXIT_ORPHANED = 4


@attrs.frozen
class Launch:
    """What the parent hands over: socket address, settings, ``module:callable`` of the engine."""

    address: str
    settings: Settings
    factory: str


def load_object(path: str) -> Any:
    """The object at ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class EngineLoop:
    """Moves requests into the engine and outputs out of it, step by step."""

    def __init__(self, engine: Any, socket: zmq.Socket[bytes]) -> None:
        self.engine = engine
        self.socket = socket
        self.owners: dict[str, bytes] = {}
        self.clients: set[bytes] = set()
        self.stopping = False
        self._next_heartbeat = 0.0

    def run(self) -> None:
        wait_ms = 0
        while not self.stopping:
            self._drain(wait_ms)
            if self.engine.has_work():
                outputs = self.engine.step()
                self._send_outputs(outputs)
                # Without outputs every request may be held: then do not spin.
                wait_ms = 0 if outputs else 1
                self._heartbeat(force=not self.engine.has_work())
            else:
                self._heartbeat()
                wait_ms = int(HEARTBEAT_S * 1000)

    def ready(self) -> wire.Ready:
        return wire.Ready(self.engine.info, self.engine.plugin_report())

    def _drain(self, wait_ms: int) -> None:
        if not self.socket.poll(wait_ms):
            return
        while True:
            try:
                client, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(client, wire.from_client.decode(data))

    def _handle(self, client: bytes, message: wire.FromClient) -> None:
        self.clients.add(client)
        if isinstance(message, wire.Submit):
            self._submit(client, message)
        elif isinstance(message, wire.Abort):
            for request_id in message.ids:
                self.engine.abort(request_id)
        elif isinstance(message, wire.Hello):
            self._send(client, self.ready())
        else:
            self.stopping = True

    def _submit(self, client: bytes, submit: wire.Submit) -> None:
        added: list[str] = []
        try:
            for sequence in submit.sequences:
                self.engine.add(_request(submit, sequence))
                added.append(sequence.id)
        except RequestError as error:
            self._reject(client, added, wire.rejected(submit.group, error))
        except Exception as error:
            # A plugin or the engine failed on this request alone: its neighbours go on.
            traceback.print_exc()
            text = f"{type(error).__name__} while the request was accepted"
            record = wire.Rejected(submit.group, text, status=500, kind="server_error")
            self._reject(client, added, record)
        else:
            self.owners.update(dict.fromkeys(added, client))

    def _reject(self, client: bytes, added: list[str], record: wire.Rejected) -> None:
        for request_id in added:
            self.engine.abort(request_id)
        self._send(client, record)

    def _send_outputs(self, outputs: list[Output]) -> None:
        by_client: dict[bytes, list[Output]] = {}
        for output in outputs:
            owner = self.owners.get(output.request_id)
            if owner is not None:
                by_client.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                self.owners.pop(output.request_id, None)
        for client, items in by_client.items():
            self._send(client, wire.Outputs(items))

    def _heartbeat(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_S
        self.broadcast(wire.Stats(self.engine.stats(), self.engine.plugin_report()))

    def broadcast(self, message: wire.FromEngine) -> None:
        for client in self.clients:
            self._send(client, message)

    def _send(self, client: bytes, message: wire.FromEngine) -> None:
        self.socket.send_multipart([client, wire.encoder.encode(message)])


def _request(submit: wire.Submit, sequence: wire.Sequence) -> Request:
    return Request(
        id=sequence.id,
        prompt_token_ids=submit.prompts[sequence.prompt],
        params=submit.params,
        priority=submit.priority,
        stream=sequence.stream,
        deadline=submit.deadline,
        extras=submit.extras,
        arrival=submit.arrival,
    )


def _watch_parent(lifeline: BinaryIO, address: str) -> None:
    def wait() -> None:
        while lifeline.read(4096):
            pass
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _open_socket(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    # Nothing may be dropped silently: a lost output would leave an HTTP request waiting forever.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.bind(address)
    return socket


def serve(launch: Launch) -> int:
    """Build the engine and run its loop; returns the exit status."""
    socket = _open_socket(launch.address)
    clients: set[bytes] = set()
    try:
        # The import takes seconds: it happens while the server still looks for the model.
        factory: Callable[..., Any] = load_object(launch.factory)
        clients.add(socket.recv_multipart()[0])
        with progress_bars() as bars:
            engine = factory(launch.settings, progress=bars.load if bars else None)
    except InterlockError as error:
        return _fail(socket, clients, str(error), EXIT_LOAD_FAILED)
    except BaseException as error:
        traceback.print_exc()
        text = f"the engine cannot start: {type(error).__name__}: {error}"
        return _fail(socket, clients, text, EXIT_LOAD_FAILED)
    loop = EngineLoop(engine, socket)
    loop.clients |= clients
    loop.broadcast(loop.ready())
    return _run(loop)


def _run(loop: EngineLoop) -> int:
    try:
        loop.run()
    except BaseException as error:
        traceback.print_exc()
        text = f"the engine's loop ended: {type(error).__name__}: {error}"
        return _fail(loop.socket, loop.clients, text, EXIT_LOOP_FAILED)
    loop.engine.close()
    loop.socket.close()
    return 0


def _fail(socket: zmq.Socket[bytes], clients: set[bytes], message: str, status: int) -> int:
    """Tell everybody who has spoken (waiting for the first, if need be); returns ``status``."""
    known = set(clients)
    while not known or socket.poll(0):
        known.add(socket.recv_multipart()[0])
    for client in known:
        socket.send_multipart([client, wire.encoder.encode(wire.Failed(message[:4000]))])
    socket.close()
    zmq.Context.instance().term()
    return status


def main() -> int:
    # The server decides when this process ends; Ctrl-C in a terminal reaches the server alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_spinning()
    launch: Launch = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
    _watch_parent(sys.stdin.buffer, launch.address)
    if launch.settings.engine.tp > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        from interlock.parallel.launch import Ranks

        Ranks.exit_when_lost = True
    return serve(launch)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of native libraries must not delay or crash the end.
    os._exit(status)
