"""The `interlock` command: ``interlock serve|chat|generate|bench|plugins|models|doctor``.

Only the chosen command's module is imported, so ``--help`` and ``--version`` stay quick whatever
a command needs. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from interlock.errors import ConfigError, InterlockError, PluginError, with_notes
from interlock.waiting import limit_spinning

USAGE_ERRORS = (ConfigError, PluginError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    from interlock.cli.parser import parse

    limit_spinning()
    try:
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
        return _reader_left()


def _reader_left() -> int:
    """The reader of our output has gone (``| head``): keep the interpreter's last flush silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
