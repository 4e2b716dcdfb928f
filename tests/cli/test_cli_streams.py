"""Streams and signals that a shell may hand to the command line: closed, full, not UTF-8, ended."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlock.cli import main, open_streams
from interlock.cli.console import download_progress

ECHO = """
import sys
import interlock.cli.parser as p
def parse(_):
    def run(args):
        print("é", sys.stdin.read())
    return type("Args", (), {"run": staticmethod(run)})
p.parse = parse
from interlock.cli import main
sys.exit(main(["x"]))
"""


def shell(redirect: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = f'"$0" -c "$1" {redirect}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, ECHO],
        input=b"caf\xe9",
        capture_output=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_traceback(redirect: str) -> None:
    done = shell(redirect)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    done = shell(">/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"interlock: error: cannot write the output: No space left on device\n"


def test_other_encodings_lose_characters_not_the_program() -> None:
    done = shell("", PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"? caf?\n"
    assert shell("", PYTHONIOENCODING="utf-8:strict").stdout == "é caf\ufffd\n".encode()


def test_streams_that_are_no_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stdin", kept)
    open_streams()
    assert sys.stdin is kept


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_its_children(number: int, monkeypatch: Any) -> None:
    cleaned: list[bool] = []

    def run(_: Any) -> int:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)
        return 0

    args = type("Args", (), {"run": staticmethod(run)})
    monkeypatch.setattr("interlock.cli.parser.parse", lambda _: args)
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended:
        main(["x"])
    assert ended.value.code == 128 + number
    assert cleaned == [True]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_download_without_a_terminal_is_announced_once(capsys: Any) -> None:
    progress = download_progress(None, "tiny")
    progress(0, 93_000_000)
    progress(93_000_000, 93_000_000)
    assert capsys.readouterr().err == "interlock: downloading tiny (93.0 MB)\n"
