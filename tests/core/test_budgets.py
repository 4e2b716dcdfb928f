"""Budgets and boundaries of the design, held by tests."""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import interlock

CORE = Path(interlock.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("spec_decode", "prefix_cache", "pd_disagg", "mxfp4")
SOURCES = sorted(CORE.rglob("*.py"))
# Names of metrics that vLLM chose and dashboards ask for, and of a file format.
FOREIGN_NAMES = ("prefix_cache_queries", "prefix_cache_hits", "mxfp4-pack-quantized")
OWN = [*SOURCES, *sorted((ROOT / "plugins").rglob("*.py"))]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def run(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "limit"), [("engine.py", 200), ("scheduler.py", 450), ("runner.py", 450)]
)
def test_the_loop_stays_small(name, limit):
    assert lines(CORE / "engine" / name) <= limit


def test_step_fits_on_a_screen():
    tree = ast.parse((CORE / "engine" / "engine.py").read_text())
    (step,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step"]
    assert step.end_lineno - step.lineno < 30


def test_no_file_is_longer_than_600_lines():
    assert {str(path): lines(path) for path in OWN if lines(path) > 600} == {}


def test_functions_are_short():
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(lengths) > 300
    assert 4 <= statistics.median(lengths) <= 10


def test_the_core_names_no_plugin():
    named = []
    for path in CORE.rglob("*"):
        if path.suffix in (".py", ".md", ".txt"):
            text = path.read_text(encoding="utf-8")
            for foreign in FOREIGN_NAMES:
                text = text.replace(foreign, "")
            named += [(str(path.relative_to(CORE)), name) for name in PLUGINS if name in text]
    assert named == []


def test_no_plugin_imports_another_and_the_core_imports_none():
    packages = {f"interlock_{name}" for name in PLUGINS}
    for path in OWN:
        folder = path.relative_to(ROOT).parts[1] if path not in SOURCES else ""
        own = {f"interlock_{folder}"} & packages
        foreign = {name.partition(".")[0] for name in imports(path)} & packages
        assert foreign <= own, path


def test_importing_interlock_changes_nothing():
    """Every module that the HTTP process may import, too: no environment, no torch, no device."""
    found = run(
        "import json, os, sys, threading\n"
        "before = dict(os.environ)\n"
        "import interlock\n"
        "alone = sorted(m for m in sys.modules if m.startswith('interlock'))\n"
        "import interlock.hookspec, interlock.plugins, interlock.settings, interlock.extension\n"
        "import interlock.engine.request, interlock.engine.outputs, interlock.errors\n"
        "print(json.dumps({'alone': alone, 'same': before == dict(os.environ),\n"
        "    'torch': 'torch' in sys.modules, 'threads': threading.active_count()}))"
    )
    assert found == {"alone": ["interlock"], "same": True, "torch": False, "threads": 1}


@pytest.mark.parametrize(
    "module",
    [
        "interlock.server.run",
        "interlock.server.app",
        "interlock.cli.bench",
        "interlock.cli.chat",
        "interlock.cli.doctor",
        "interlock.cli.generate",
        "interlock.cli.models",
        "interlock.cli.plugins",
        "interlock.cli.serve",
        "interlock.tokenizer",
        "interlock.chat",
        "interlock.weights.resolve",
        "interlock.weights.config",
    ],
)
def test_the_http_process_and_the_command_line_need_no_torch(module):
    code = (
        "import json, os, sys\nbefore = dict(os.environ)\n"
        f"import {module}\n"
        "changed = {k for k in os.environ if os.environ[k] != before.get(k)} | {\n"
        "    k for k in before if k not in os.environ}\n"
        "print(json.dumps([sorted(changed), 'torch' in sys.modules]))"
    )
    assert run(code) == [[], False]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_imports_no_torch_and_little_else(arguments):
    code = (
        "import json, sys\nfrom interlock.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'sanic', 'tokenizers', 'gguf', 'numba', 'rich', 'jinja2'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    assert run(code) == []


def test_committed_files_name_no_path_of_a_machine():
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.decode().split("\0"):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".ini") and path.is_file():
            text = path.read_text(encoding="utf-8")
            assert "/work/" + "main" not in text, name
            assert "/tmp/" + "v/" not in text, name
