"""A rank above 0: loads its share of the model, then computes what rank 0 sends.

It schedules nothing, samples nothing and has no clock: whether a request has timed out, or which
token comes next, is decided once, on rank 0. It ends when rank 0 does, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from interlock.errors import InterlockError, describe_error
from interlock.parallel import launch, wire
from interlock.parallel.group import TensorParallel
from interlock.settings import Settings, load_settings
from interlock.waiting import limit_spinning

EXIT_FAILED = 1
EXIT_ORPHANED = 4


def main() -> int:
    """Run as a worker until rank 0 says stop, or is gone; returns the exit status."""
    # Rank 0 decides when this process ends; Ctrl-C in a terminal would reach all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_spinning()
    channel, rank = _connect()
    inbox: queue.Queue[wire.ToWorker | None] = queue.Queue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    try:
        return _work(rank, inbox)
    except BaseException as error:
        if inbox.qsize() and inbox.queue[-1] is None:
            return EXIT_ORPHANED
        if not isinstance(error, InterlockError):
            traceback.print_exc()
        with contextlib.suppress(EOFError):
            channel.send(wire.Failed(describe_error(error)[:2000]))
        return EXIT_FAILED


def _connect() -> tuple[wire.Channel, int]:
    outer = launch.torchrun()
    if outer is None:
        address, token, number = (os.environ[name] for name in launch.ENVIRONMENT)
        host, _, text = address.partition(":")
        rank, port = int(number), int(text)
    else:
        rank, size = outer
        # Nothing is known of the settings yet; the timeout matters for the start alone.
        launch.init_group(size, rank, Settings())
        host, port, token = launch.published()
    channel = wire.Channel(socket.create_connection((host, port), timeout=launch.CONNECT_S))
    channel.sock.settimeout(None)
    channel.send(wire.Hello(token, rank))
    return channel, rank


def _listen(channel: wire.Channel, inbox: queue.Queue[wire.ToWorker | None]) -> None:
    try:
        while True:
            message = channel.from_rank_0()
            inbox.put(message)
            if isinstance(message, wire.Stop):
                return
    except Exception:
        inbox.put(None)
        # The main thread may wait for rank 0 in a collective, for ever.
        time.sleep(launch.GRACE_S)
        os._exit(EXIT_ORPHANED)


def _work(rank: int, inbox: queue.Queue[wire.ToWorker | None]) -> int:
    load = inbox.get()
    if load is None:
        return EXIT_ORPHANED
    assert isinstance(load, wire.Load)
    runner = _runner(rank, load)
    while True:
        message = inbox.get()
        if message is None:
            return EXIT_ORPHANED
        if isinstance(message, wire.Step):
            runner.model.tap_layers = tuple(message.taps)
            runner.forward(wire.plan_of(message))
        elif isinstance(message, wire.Settle):
            runner.settle_rows(message.kept)
        else:
            return 0


def _runner(rank: int, load: wire.Load) -> Any:
    from interlock.engine.runner import ModelRunner
    from interlock.plugins import Plugins, configure

    settings = load_settings(load.plugins, flags=load.values)
    if load.port is not None:
        store = launch.tcp_store(load.port, load.size, master=False)
        launch.init_group(load.size, rank, settings, store)
    plugins = Plugins.load(settings.plugins)
    configure(plugins, settings)
    local = load.size if load.port is not None else int(os.environ["LOCAL_WORLD_SIZE"])
    return ModelRunner(settings, plugins, tp=TensorParallel(rank, load.size), local_ranks=local)


def run() -> NoReturn:
    """`main`, and the end of this process, which no thread of a native library may delay."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
