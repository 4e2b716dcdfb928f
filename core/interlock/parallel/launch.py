"""Starting the ranks, and noticing when one of them is gone. Runs on rank 0.

With ``--tp N`` alone, rank 0 starts the other ranks as processes of its own. Under ``torchrun`` all
ranks exist already, and those above 0 become workers (see `interlock.parallel.worker`). Tensors go
through torch.distributed; what to compute goes through one socket for each worker, whose end tells
that the peer has died, at once and also while nothing is being computed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import msgspec
import torch

from interlock.engine.batch import Plan
from interlock.errors import ConfigError, EngineDeadError, InterlockError
from interlock.parallel import wire
from interlock.parallel.group import TensorParallel
from interlock.settings import Settings

CONNECT_S = 120.0
GRACE_S = 2.0
EXIT_LOST_RANK = 3
ENVIRONMENT = ("INTERLOCK_TP_ADDRESS", "INTERLOCK_TP_TOKEN", "INTERLOCK_TP_RANK")
_ADDRESS_BYTES = 512


def torchrun() -> tuple[int, int] | None:
    """``(rank, ranks)`` if torchrun has started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (rank, size) if size > 1 else None


def wanted(settings: Settings) -> int:
    """How many ranks the model is spread over. Raises ConfigError if torchrun has others."""
    given, outer = settings.engine.tp, torchrun()
    if outer is None:
        return given
    if given not in (1, outer[1]):
        raise ConfigError(
            f"engine.tp: torchrun has started {outer[1]} ranks, not {given}; leave --tp out, or "
            "give torchrun as many"
        )
    return outer[1]


def tcp_store(port: int, size: int, *, master: bool) -> Any:
    """Where the ranks of one machine meet; port 0 takes any."""
    kinds: Any = torch.distributed
    return kinds.TCPStore("127.0.0.1", port, size, is_master=master, wait_for_workers=False)


def init_group(size: int, rank: int, settings: Settings, store: Any = None) -> None:
    """Join torch's default process group: gloo, and NCCL beside it where there are GPUs."""
    if torch.distributed.is_initialized():
        raise ConfigError("engine.tp: this process has an engine with several ranks already")
    cuda = torch.cuda.is_available() and settings.engine.device != "cpu"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=settings.engine.collective_timeout_s),
    )


class Ranks:
    """The workers of one engine, as rank 0 sees them."""

    exit_when_lost = False
    """Whether losing a rank ends this process even if it waits in a collective for ever; for
    processes that exist for their engine alone."""

    def __init__(self, settings: Settings, size: int) -> None:
        self.tp = TensorParallel(0, size)
        self.local = torchrun() is None
        self.lost: str | None = None
        self._closing = False
        self._token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, wire.Channel] = {}
        try:
            self._start(settings, size)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: Settings, size: int) -> None:
        listener = socket.create_server(("127.0.0.1" if self.local else "", 0))
        store = None
        with listener:
            if self.local:
                self._spawn(listener.getsockname()[1], size)
                store = tcp_store(0, size, master=True)
            else:
                init_group(size, 0, settings)
                _publish(os.environ["MASTER_ADDR"], listener.getsockname()[1], self._token)
            self._accept(listener, size)
        values = _values(settings)
        port = store.port if store else None
        for channel in self._channels.values():
            channel.send(wire.Load(list(settings.plugins), values, size, port))
        self._watch()
        if store is not None:
            self._checked(lambda: init_group(size, 0, settings, store))

    def _spawn(self, port: int, size: int) -> None:
        given = (f"127.0.0.1:{port}", self._token)
        for rank in range(1, size):
            extra = dict(zip(ENVIRONMENT, (*given, str(rank)), strict=True))
            process = subprocess.Popen(
                [sys.executable, "-m", "interlock.parallel.worker"],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno() else None,
                env={**os.environ, **extra},
            )
            self._processes.append(process)

    def _accept(self, listener: socket.socket, size: int) -> None:
        """Wait for every worker's hello, or for the first that ends without one."""
        listener.settimeout(0.1)
        limit = time.monotonic() + CONNECT_S
        while len(self._channels) < size - 1:
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise EngineDeadError(f"rank {rank} ended with status {process.returncode}")
            if time.monotonic() > limit:
                missing = sorted(set(range(1, size)) - self._channels.keys())
                raise EngineDeadError(f"rank {missing[0]} did not connect in {CONNECT_S:.0f} s")
            with contextlib.suppress(TimeoutError, EOFError, msgspec.DecodeError):
                self._greet(listener.accept()[0], size)

    def _greet(self, sock: socket.socket, size: int) -> None:
        sock.settimeout(5.0)
        channel = wire.Channel(sock)
        hello = channel.from_worker()
        known = isinstance(hello, wire.Hello) and secrets.compare_digest(hello.token, self._token)
        if not known or not isinstance(hello, wire.Hello) or not 0 < hello.rank < size:
            channel.close()
            return
        sock.settimeout(None)
        self._channels[hello.rank] = channel

    # -- steps ---------------------------------------------------------------------------------

    def step(self, plan: Plan, taps: tuple[int, ...] = ()) -> None:
        self._send(wire.step_of(plan, taps))

    def settle(self, kept: Sequence[int]) -> None:
        self._send(wire.Settle(list(kept)))

    def _send(self, message: Any) -> None:
        self.check()
        for channel in self._channels.values():
            with contextlib.suppress(EOFError):
                channel.send(message)
        self.check()

    def check(self) -> None:
        """Raise EngineDeadError if a rank is gone."""
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    def loaded(self, work: Callable[[], Any]) -> Any:
        """``work()``, whose own error comes before what it does to the others."""
        try:
            return self._checked(work)
        except EngineDeadError as error:
            if isinstance(error.__cause__, InterlockError):
                raise error.__cause__ from None
            raise

    def guarded(self, work: Callable[[], Any]) -> Any:
        """``work()``; whatever it raises ends the engine, since ranks would no longer agree."""
        return self._checked(work)

    def _checked(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            # The peer's end is noticed by another thread, maybe a moment after the collective's.
            limit = time.monotonic() + GRACE_S / 2
            while self.lost is None and time.monotonic() < limit:
                time.sleep(0.01)
            reason = self.lost or f"rank 0 failed: {type(error).__name__}: {error}"
            raise EngineDeadError(reason) from error

    # -- ends ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        for rank, channel in self._channels.items():
            thread = threading.Thread(target=self._listen, args=(rank, channel), daemon=True)
            thread.name = f"rank-{rank}"
            thread.start()

    def _listen(self, rank: int, channel: wire.Channel) -> None:
        """Read what a worker has to say: nothing until its end."""
        text = None
        with contextlib.suppress(EOFError, msgspec.DecodeError):
            while True:
                message = channel.from_worker()
                if isinstance(message, wire.Failed):
                    text = message.text
        if self._closing or self.lost is not None:
            return
        self.lost = f"rank {rank} {self._obituary(rank, text)}"
        if self.exit_when_lost:
            time.sleep(GRACE_S)
            print(f"interlock: error: {self.lost}", file=sys.stderr, flush=True)
            self._end_processes()
            os._exit(EXIT_LOST_RANK)

    def _obituary(self, rank: int, text: str | None) -> str:
        if text is not None:
            return f"failed: {text}"
        if not self.local:
            return "is gone"
        try:
            status = self._processes[rank - 1].wait(GRACE_S / 2)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """Stop the workers and leave no process behind."""
        if self._closing:
            return
        self._closing = True
        for channel in self._channels.values():
            with contextlib.suppress(EOFError):
                channel.send(wire.Stop())
        for process in self._processes if self.lost is None else []:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        self._end_processes()
        for channel in self._channels.values():
            channel.close()
        if torch.distributed.is_initialized() and self.lost is None:
            torch.distributed.destroy_process_group()

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        limit = time.monotonic() + GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _has_fileno() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False


def _values(settings: Settings) -> dict[str, Any]:
    """Every value by its full name, as `interlock.settings.load_settings` takes them."""
    sections: Mapping[str, Any] = {"engine": settings.engine, **settings.sections}
    return {
        f"{section}.{field.name}": msgspec.to_builtins(getattr(values, field.name))
        for section, values in sections.items()
        for field in attrs.fields(type(values))
    }


def _publish(host: str, port: int, token: str) -> None:
    """Tell all ranks of the group where rank 0 listens."""
    data = msgspec.json.encode([host, port, token]).ljust(_ADDRESS_BYTES)
    torch.distributed.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)


def published() -> tuple[str, int, str]:
    """What `_publish` has told, on another rank."""
    data = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    torch.distributed.broadcast(data, 0)
    return msgspec.json.decode(bytes(data.tolist()), type=tuple[str, int, str])
