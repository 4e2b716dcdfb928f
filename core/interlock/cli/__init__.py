"""The `interlock` command: ``interlock serve|chat|generate|bench|plugins|models|doctor``.

Only the chosen command's module is imported, so ``--help`` and ``--version`` stay quick whatever
a command needs. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted by Ctrl-C, 143
and 129 ended by SIGTERM and SIGHUP.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from interlock.errors import ConfigError, InterlockError, PluginError, with_notes
from interlock.waiting import limit_spinning

USAGE_ERRORS = (ConfigError, PluginError)
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    from interlock.cli.parser import parse

    limit_spinning()
    open_streams()
    if int(os.environ.get("RANK", "0")) and "TORCHELASTIC_RUN_ID" in os.environ:
        from interlock.parallel import worker

        worker.run()
    try:
        with _cleaned_up_when_ended():
            args = parse(list(sys.argv[1:] if argv is None else argv))
            code = args.run(args)
            sys.stdout.flush()
        return int(code or 0)
    except InterlockError as error:
        print(f"interlock: error: {with_notes(error)}", file=sys.stderr)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (``| head``).
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        _drop_output()
        print(f"interlock: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def open_streams() -> None:
    """Make the standard streams usable whatever the caller's shell did to them.

    A closed one (``<&-``) reads or writes nothing; text that the terminal's encoding lacks is
    shown as ``?``, and bytes that are no text are read as U+FFFD.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def _cleaned_up_when_ended() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like Ctrl-C does, so that no child process stays behind."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    main_thread = threading.current_thread() is threading.main_thread()
    ours = [n for n in numbers if main_thread and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _drop_output() -> None:
    """Keep the interpreter's last flush silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
