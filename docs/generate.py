"""Writes docs/hooks.md from hookspec.py and extension.py, and docs/settings.md from settings.py.

``python docs/generate.py`` writes; with ``--check`` it only says what is out of date, and fails.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from interlock import extension, hookspec
from interlock.plugins import Plugins, discover
from interlock.settings import CORE_SECTIONS

DOCS = Path(__file__).resolve().parent
EXAMPLE = """\
plugins = []          # the exact list, in order

[engine]
model = "smollm2-135m"
max_num_seqs = 16

[server]
port = 8080
"""
NOTE = "<!-- Written by docs/generate.py; change {source} instead. -->\n"


def signature(function: ast.FunctionDef) -> str:
    """``name(argument, …)`` as the heading of a hook shows it."""
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    return f"{function.name}({', '.join(names)})"


def hook_sections() -> Iterator[tuple[str, list[ast.FunctionDef]]]:
    """The hooks of hookspec.py by the banner comments that divide it."""
    source = inspect.getsource(hookspec)
    banners = [
        (source[: found.start()].count("\n") + 1, found[1].strip())
        for found in re.finditer(r"^# -- (.*?) -+$", source, re.M)
    ]
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("interlock_")
    ]
    for (line, title), (end, _) in zip(banners, [*banners[1:], (10**9, "")], strict=True):
        yield title, [f for f in functions if line < f.lineno < end]


def hooks_page() -> str:
    parts = [
        "# Hooks\n",
        NOTE.format(source="core/interlock/hookspec.py or extension.py"),
        prose(inspect.getdoc(hookspec) or ""),
        "How to use them: [Writing a plugin](writing-a-plugin.md). Why they are cut like this: "
        "[Design](design.md).\n",
    ]
    for title, functions in hook_sections():
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts += [hook_entry(function) for function in functions]
    parts.append("## Objects that plugins hand over\n")
    parts.append(prose(inspect.getdoc(extension) or ""))
    parts.append(f"`API_VERSION` is {extension.API_VERSION}.\n")
    parts += [object_entry(node) for node in classes_of(extension)]
    return "\n".join(parts)


def hook_entry(function: ast.FunctionDef) -> str:
    facts = ["warm" if function.name in hookspec.WARM else "cold"]
    if "firstresult=True" in ast.unparse(function.decorator_list[0]):
        facts.append("exclusive")
    return (
        f"### {signature(function)}\n\n*{', '.join(facts)}*\n\n"
        f"{types(function)}\n{document(ast.get_docstring(function) or '')}"
    )


def types(function: ast.FunctionDef) -> str:
    """The definition with its types, one argument a line."""
    arguments = [
        f"    {argument.arg}: {ast.unparse(argument.annotation)},\n"
        for argument in function.args.args
        if argument.annotation is not None
    ]
    returns = ast.unparse(function.returns) if function.returns else "None"
    inner = f"\n{''.join(arguments)}" if arguments else ""
    return f"```python\ndef {function.name}({inner}) -> {returns}: ...\n```\n"


def document(text: str) -> str:
    """A docstring with ``:param x:`` fields as a Markdown document with a list."""
    text = re.sub(r"\n {4,}(?=\S)", " ", text)
    fields = re.findall(r"^:(?:param )?(\w+): (.*)$", text, re.M)
    body = re.sub(r"^:(?:param )?\w+: .*\n?", "@FIELDS@\n", text, flags=re.M)
    body = re.sub(r"(@FIELDS@\n?)+", "@FIELDS@\n", body)
    listed = "".join(f"- `{name}`: {prose(value).strip()}\n" for name, value in fields)
    return prose(body).replace("@FIELDS@\n", listed)


def prose(text: str) -> str:
    """The code's docstrings as Markdown: code stands between single backquotes."""
    return re.sub(r"``([^`]+)``", r"`\1`", text).strip() + "\n"


def classes_of(module: Any) -> list[ast.ClassDef]:
    body = ast.parse(inspect.getsource(module)).body
    return [node for node in body if isinstance(node, ast.ClassDef)]


def object_entry(node: ast.ClassDef) -> str:
    lines = [f"### {node.name}\n", prose(ast.get_docstring(node) or "")]
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            lines.append(f"- `{ast.unparse(item)}`\n")
        elif isinstance(item, ast.FunctionDef):
            text = re.sub(r"\n(?=.)", "\n  ", prose(ast.get_docstring(item) or "")).rstrip()
            lines.append(f"- `{signature(item)}`: {text}\n")
    return "\n".join(lines)


def settings_page() -> str:
    parts = [
        "# Settings\n",
        NOTE.format(source="core/interlock/settings.py or a plugin's"),
        "A value comes from its default, then a TOML file (`--config FILE.toml`), then its flag "
        "(`--block-size 32`), then `--set engine.block_size=32`; the last one wins. Every key that "
        "is given is applied or refused. `none` stands for no value. Plugins bring sections of "
        "their own, named like the plugin; `interlock plugins --plugins NAME` lists them.\n",
        f"```toml\n{EXAMPLE}```\n",
    ]
    for name, kind in {**CORE_SECTIONS, **plugin_sections()}.items():
        parts.append(f"## {name}\n")
        parts.append("| setting | type | default | meaning |\n|---|---|---|---|")
        hints = typing.get_type_hints(kind)
        parts += [setting_row(name, field, hints[field.name]) for field in attrs.fields(kind)]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def plugin_sections() -> dict[str, type[Any]]:
    """Settings of the plugins that come with interlock itself."""
    names = [info.name for info in discover() if info.distribution == "interlock"]
    return Plugins.load(names).setting_types()


def setting_row(section: str, field: Any, hint: Any) -> str:
    kind = kind_text(hint).replace("|", "\\|")
    meaning = field.metadata["help"].replace("|", "\\|")
    return f"| `{section}.{field.name}` | {kind} | `{default_text(field.default)}` | {meaning} |"


def kind_text(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "list of str"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("None", "none")


def default_text(value: Any) -> str:
    if value in (None, ()):
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


PAGES = {"hooks.md": hooks_page, "settings.md": settings_page}


def main(arguments: list[str]) -> int:
    stale = [name for name, page in PAGES.items() if _text(name) != page()]
    if "--check" in arguments:
        if stale:
            print(f"out of date: {', '.join(stale)}; run: python docs/generate.py")
        return int(bool(stale))
    for name in stale:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    return 0


def _text(name: str) -> str:
    path = DOCS / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
