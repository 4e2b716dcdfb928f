"""The command line itself: what it imports, how it fails, what it suggests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interlock import __version__
from interlock.cli import main
from interlock.cli.parser import COMMANDS, parse, unknown
from interlock.errors import ConfigError, InterlockError

HEAVY = ("torch", "rich", "httpx", "psutil", "numpy", "jinja2", "tokenizers", "sanic")


def interlock(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interlock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def imported_by(*words: str) -> set[str]:
    """Top-level modules in ``sys.modules`` after a command line."""
    code = f"""
        import sys
        from interlock.cli import main
        try:
            main({list(words)!r})
        except SystemExit:
            pass
        print("\\nMODULES", *{{name.partition(".")[0] for name in sys.modules}})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["bench", "run", "-h"]]
)
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    assert not imported_by(*words) & set(HEAVY)


@pytest.mark.parametrize("words", [["plugins"], ["serve", "--plugins", "nosuch"]])
def test_plugin_questions_need_no_torch(words: list[str]) -> None:
    assert "torch" not in imported_by(*words)


def test_version() -> None:
    assert interlock("--version").stdout == f"interlock {__version__}\n"


def test_help_names_every_command() -> None:
    text = interlock("--help").stdout
    assert all(f"    {name} " in text for name in COMMANDS)


def test_a_mistyped_command_gets_suggestions(capsys: Any) -> None:
    assert main(["sreve"]) == 2
    assert capsys.readouterr().err == (
        "interlock: error: unknown command 'sreve'; did you mean serve?\n"
    )


def test_an_unlike_command_gets_the_list() -> None:
    assert unknown("command", "xyzzy", ["a", "b"]) == "unknown command 'xyzzy'; known: a, b"


def test_no_command_is_a_usage_error(capsys: Any) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--port", "http"], "server.port"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--dtype", "float3"], "engine.dtype: must be one of auto, bfloat16"),
        (["serve", "--threads", "100000"], "'threads' must be <= 1024"),
        (["serve", "--api-key", ""], "'api_key' must not be empty"),
        (["serve", "--set", "engine.dtyp=auto"], "did you mean engine.dtype"),
        (["serve", "--set", "nonsense"], "section.key=value"),
        (["serve", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["serve", "--plugins", "nosuch"], "plugin 'nosuch' is not installed"),
        (["serve", "--nonsense"], "--nonsense (see: interlock serve --help)"),
        (["models", "list", "more"], "more (see: interlock models --help)"),
        (["bench", "run", "--concurrency", "a"], "a whole number is expected, not 'a'"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--temperature", "9"], "--temperature must be between"),
        (["generate", "x", "--top-p", "2"], "--top-p must be between"),
        (["generate", "x", "-n", "0"], "-n must be at least 1"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], message: str, capsys: Any) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("interlock: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_missing_model_is_one_line_and_status_1(capsys: Any) -> None:
    assert main(["generate", "x", "--model", "smollm2-135"]) == 1
    assert "did you mean smollm2-135m" in capsys.readouterr().err


def command(monkeypatch: Any, run: Any) -> None:
    def fake_parse(_: list[str]) -> Any:
        return type("Args", (), {"run": staticmethod(run)})

    monkeypatch.setattr("interlock.cli.parser.parse", fake_parse)


def failing(error: BaseException) -> Any:
    def run(_: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [(InterlockError("x"), 1), (ConfigError("x"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: Any, capsys: Any) -> None:
    command(monkeypatch, failing(error))
    assert main(["x"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import sys; from interlock.cli import main; sys.exit(main(['serve', '--help'] ))"
    loop = f"import interlock.cli.parser as p\n{BROKEN}\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", loop], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


BROKEN = """
def parse(_):
    def run(args):
        for i in range(100_000):
            print("line", i)
    return type("Args", (), {"run": staticmethod(run)})
p.parse = parse
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_quietly_with_130() -> None:
    code = f"import interlock.cli.parser as p\n{SLEEPER}\nfrom interlock.cli import main\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "import sys; sys.exit(main(['x']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


SLEEPER = """
def parse(_):
    def run(args):
        import time
        print("ready", flush=True)
        time.sleep(60)
    return type("Args", (), {"run": staticmethod(run)})
p.parse = parse
"""


# -- settings ----------------------------------------------------------------------------------


def settings(*words: str) -> Any:
    from interlock.cli.options import settings_of

    return settings_of(parse(["serve", *words]))


def test_every_engine_and_server_setting_has_an_option() -> None:
    import attrs

    from interlock.settings import CORE_SECTIONS

    args = vars(parse(["serve"]))
    for section, kind in CORE_SECTIONS.items():
        assert {f"{section}.{f.name}" for f in attrs.fields(kind)} <= set(args)


def test_flags_arrive_and_set_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[engine]\nblock_size = 8\nthreads = 3\nbatch_invariant = true\n")
    words = ["--config", str(path), "--threads", "2", "--no-batch-invariant"]
    got = settings(*words, "--set", "server.port=81", "--port", "80")
    assert (got.engine.block_size, got.engine.threads, got.server.port) == (8, 2, 81)
    assert got.engine.batch_invariant is False
    assert got.source("engine.threads") == "flag"


def test_api_keys_come_from_flags_or_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_API_KEY", "secret")
    assert settings().server.api_key == ("secret",)
    assert settings("--api-key", "a", "--api-key", "b").server.api_key == ("a", "b")


def test_plugins_none_overrides_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_PLUGINS", "nosuch")
    assert settings("--plugins", "none").plugins == ()
    with pytest.raises(InterlockError, match="nosuch"):
        settings()


def test_serve_hands_the_settings_to_the_server(monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("interlock.server.run.run_server", lambda s: seen.append(s) or 3)
    assert main(["serve", "--port", "1234"]) == 3
    assert seen[0].server.port == 1234


def test_a_busy_port_is_found_before_a_download(monkeypatch: Any, tmp_path: Path) -> None:
    from interlock.cli import serve
    from interlock.server.run import StartError

    @contextmanager
    def bars() -> Iterator[Any]:
        yield SimpleNamespace(download=lambda _: None)

    pulled: list[str] = []
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path))
    monkeypatch.setattr("interlock.cli.serve.progress_bars", bars)
    monkeypatch.setattr("interlock.weights.resolve.pull", lambda name, _: pulled.append(name))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(StartError, match=str(port)):
            serve._download_visibly(settings("--port", str(port)))
    assert pulled == []
    serve._download_visibly(settings("--port", "0"))
    assert pulled == ["smollm2-135m"]
