"""Documentation, code and tests say the same: nothing undocumented, nothing stale, no dead link."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import attrs
import msgspec
import pytest

from interlock import __version__, extension, hookspec
from interlock.cli.parser import COMMANDS
from interlock.engine.request import _OPTIONAL_RANGES, _RANGES
from interlock.server import metrics, protocol, routes_openai, routes_ops
from interlock.settings import CORE_SECTIONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
HOOKS = sorted(name for name in vars(hookspec) if name.startswith("interlock_"))


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_exact_arguments(hook):
    arguments = ", ".join(inspect.signature(getattr(hookspec, hook)).parameters)
    assert f"\n### {hook}({arguments})\n" in TEXT["hooks.md"]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_what_its_arguments_are_and_when_it_is_called(hook):
    function = getattr(hookspec, hook)
    text = inspect.getdoc(function)
    for argument in inspect.signature(function).parameters:
        assert f":param {argument}:" in text
    assert "**Called**:" in text
    assert (":returns:" in text) == (inspect.signature(function).return_annotation != "None")
    if "**Called**: cold" not in text and "**Called**: warm" not in text:
        assert hook == "interlock_counters"
    assert ("**Called**: warm" in text) == (hook in hookspec.WARM)


def test_every_documented_hook_exists():
    assert sorted(re.findall(r"^### (interlock_\w+)\(", TEXT["hooks.md"], re.M)) == HOOKS
    known = {name.partition("(")[0] for name in HOOKS} | {"interlock_logit_bias"}
    known |= {path.name for path in (ROOT / "plugins").glob("*/interlock_*")}
    for name, text in TEXT.items():
        for word in re.findall(r"\binterlock_[a-z0-9_]+", text):
            allowed = word in known or name == "server.md" or word.endswith("_")
            assert allowed, f"{name}: {word}"


def test_every_hook_has_a_test():
    tree = ast.parse((ROOT / "tests/core/test_hooks.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted = {f"test_hook_{hook.removeprefix('interlock_')}" for hook in HOOKS}
    assert wanted <= tests, wanted - tests


def test_every_handed_over_object_is_documented_with_its_methods():
    for name, kind in vars(extension).items():
        if not inspect.isclass(kind) or kind.__module__ != extension.__name__:
            continue
        _, found, section = TEXT["hooks.md"].partition(f"\n### {name}\n")
        assert found, name
        section = section.partition("\n### ")[0]
        for method, function in vars(kind).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                arguments = ", ".join(list(inspect.signature(function).parameters)[1:])
                if getattr(kind, "_is_protocol", False):
                    assert f"- `{method}({arguments})`" in section


# -- settings, commands, routes --------------------------------------------------------------------


def test_every_setting_is_documented():
    for section, kind in CORE_SECTIONS.items():
        for field in attrs.fields(kind):
            assert f"| `{section}.{field.name}` |" in TEXT["settings.md"]


def test_settings_named_in_the_documentation_exist():
    sections = CORE_SECTIONS.items()
    known = {f"{name}.{field.name}" for name, kind in sections for field in attrs.fields(kind)}
    inner = {"engine.scheduler", "engine.runner", "engine.x", "engine.y"}
    for name, text in TEXT.items():
        for word in re.findall(r"\b(?:engine|server)\.(?!md|py)[a-z_]+\b", text):
            assert word in known | inner, f"{name}: {word}"


def test_commands_in_the_documentation_exist_and_all_are_mentioned():
    everything = "\n".join([*TEXT.values(), (ROOT / "README.md").read_text(encoding="utf-8")])
    used = set(re.findall(r"\binterlock (?:--\S+ )*([a-z][a-z-]+)\b", _code(everything)))
    assert used == set(COMMANDS)


def _code(text: str) -> str:
    """The commands in fenced blocks and between backquotes, one a line."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside:
            lines += re.findall(r"\binterlock [^:#]*(?=#|$)", line)
        else:
            lines += re.findall(r"`(interlock [^`\n]+)`", line)
    return "\n".join(lines)


def test_options_in_the_documentation_exist():
    known = set()
    for command in COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(command.module).add_arguments(parser)
        known |= _options(parser)
    for line in _code("\n".join(TEXT.values())).splitlines():
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", line):
            assert option in known, line


def _options(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*(_options(sub) for sub in action.choices.values()))
    return found


def test_every_route_is_documented():
    for path, method, _ in (*routes_openai.ROUTES, *routes_ops.ROUTES):
        shown = path.replace("<model_id:path>", "{id}")
        assert f"{method} {shown}`" in TEXT["server.md"] or f"`{shown}`" in TEXT["server.md"], path


def test_every_request_field_is_documented():
    kinds = (protocol.CompletionRequest, protocol.ChatRequest, protocol.StreamOptions)
    fields = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    # What a body is about, shown in examples; and a switch that asks for nothing of the answer.
    fields -= {"model", "prompt", "messages", "include_obfuscation"}
    assert {name for name in fields if f"`{name}`" not in TEXT["server.md"]} == set()


def test_documented_ranges_are_those_of_the_code():
    rows = [line.split(" | ")[:2] for line in TEXT["server.md"].splitlines() if line[:1] == "|"]
    for name, low, high in [*_RANGES, *((n, *r) for n, r in _OPTIONAL_RANGES.items())]:
        (span,) = [row[1] for row in rows if f"`{name}`" in row[0]]
        for bound in (low, high):
            if 0 < abs(bound) < 1000:
                assert f"{bound:g}" in span, (name, bound)


def test_every_metric_is_documented():
    named = {*metrics._HISTOGRAMS, *(f"{name}_total" for name in metrics._COUNTERS)}
    assert {name for name in named if f"`{name}`" not in TEXT["server.md"]} == set()


# -- pages -----------------------------------------------------------------------------------------


def test_generated_pages_are_up_to_date(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_page_is_found(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "hooks.md, settings.md" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_included_code_equals_its_file():
    found = re.findall(r"<!-- include (\S+) -->\n```\w+\n(.*?)```", "\n".join(TEXT.values()), re.S)
    assert len(found) == 2
    for path, code in found:
        assert code == (ROOT / path).read_text(encoding="utf-8"), path


def test_internal_links_lead_somewhere():
    pages = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.is_file(), f"{page.name}: {target}"
            if anchor:
                assert anchor in _anchors(linked), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_every_page_is_reachable_from_the_index():
    for name in TEXT.keys() - {"index.md"}:
        assert f"]({name})" in TEXT["index.md"]


def test_files_named_in_the_documentation_exist():
    for name, text in TEXT.items():
        for path in re.findall(r"`((?:tests|core|docs|plugins)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{name}: {path}"


def test_tests_named_in_the_documentation_exist():
    functions: dict[str, set[str]] = {}
    for name, text in TEXT.items():
        for path, test in re.findall(r"`((?:tests|plugins)/[\w./-]+\.py)::(\w+)`", text):
            if path not in functions:
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
                functions[path] = {node.name for node in tree.body if isinstance(node, kinds)}
            assert test in functions[path], f"{name}: {path}::{test}"


def test_every_user_report_has_a_test_or_says_what_it_waits_for():
    text = TEXT["user-reports.md"]
    rows = re.findall(r"^\| ([A-Z]{3,4}-\d\d) \|.*\| (.*) \|$", text, re.M)
    assert len(dict(rows)) == len(rows) == int(re.search(r"^(\d+) reports", text, re.M)[1])
    for report, cell in rows:
        tests = re.findall(r"`(?:tests|plugins)/[\w./-]+\.py::test_\w+`", cell)
        waits = cell.startswith(("not yet: ", "waits for "))
        assert waits or ", ".join(tests) == cell != "", report


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in text
    assert text.index("## [Unreleased]") < text.index(f"## [{__version__}]")
