"""Starts, watches and ends the engine process; the server's only child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from interlock.errors import InterlockError
from interlock.server.engine_process import EXIT_LOAD_FAILED, EXIT_LOOP_FAILED, Launch
from interlock.settings import Settings

STOP_GRACE_S = 5.0
SOCKET_NAME = "engine"
MAX_SOCKET_PATH = 100
"""Unix allows a socket's path 107 bytes (103 on macOS)."""


class EngineProcess:
    """One engine process and the private folder that holds its socket.

    The child leads a session of its own, so that Ctrl-C in a terminal does not reach it, and
    holds a pipe from this process: however this process ends, the child ends too.
    """

    def __init__(self, settings: Settings, factory: str) -> None:
        self._folder = _private_folder()
        self.address = f"ipc://{self._folder / SOCKET_NAME}"
        self._launch = Launch(self.address, settings, factory)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Raises InterlockError if a plugin's settings cannot travel to another process."""
        try:
            message = pickle.dumps(self._launch)
        except Exception as error:
            raise InterlockError(f"the settings cannot be pickled: {error}") from error
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "interlock.server.engine_process",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        # A child that died at once is reported by `wait`, not here.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.drain()

    async def wait(self) -> str:
        """Wait for the end; returns how it came, in words."""
        assert self._process is not None
        return describe_exit(await self._process.wait())

    async def stop(self) -> None:
        """End the process: it has `STOP_GRACE_S` to do so itself, if it was asked to."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
            return
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="interlock-"))
    if len(os.fsencode(folder / SOCKET_NAME)) > MAX_SOCKET_PATH:
        folder.rmdir()
        raise InterlockError(
            f"the path of the temporary folder {folder.parent} is too long for a socket; "
            f"set TMPDIR to a shorter one"
        )
    return folder


def describe_exit(status: int) -> str:
    """What an exit status of the engine process means, with the likely cause."""
    if status == -signal.SIGKILL:
        return "it was killed (signal 9; often the system ran out of memory)"
    if status < 0:
        return f"it was ended by signal {-status}"
    if status in (EXIT_LOAD_FAILED, EXIT_LOOP_FAILED):
        return f"exit status {status}; the reason stands above in the log"
    return f"exit status {status}"
