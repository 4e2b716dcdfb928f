"""Options that most commands share, made from the fields of the settings classes."""

from __future__ import annotations

import argparse
import os
import typing
from pathlib import Path
from typing import Any

import attrs

from interlock.cli.parser import named_plugins
from interlock.settings import CORE_SECTIONS, Settings, load_settings


def add_settings(parser: argparse.ArgumentParser, *sections: str) -> None:
    """Add ``--plugins``, ``--set``, ``--config`` and one option for each field of ``sections``."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--plugins",
        metavar="A,B|none",
        help="the exact plugins, in order (default: $INTERLOCK_PLUGINS, the file's, or none)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, also a plugin's; may be repeated and wins over all others",
    )
    group.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a TOML file")
    for section in sections:
        _add_section(parser.add_argument_group(f"{section} settings"), section)


def _add_section(group: Any, section: str) -> None:
    kind = CORE_SECTIONS[section]
    hints = typing.get_type_hints(kind)
    for field in attrs.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        kwargs = _form(hints[field.name])
        help_text = _help(field)
        group.add_argument(flag, dest=f"{section}.{field.name}", help=help_text, **kwargs)


def _form(hint: Any) -> dict[str, Any]:
    if bool in _alternatives(hint):
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if typing.get_origin(hint) is tuple:
        return {"action": "append", "metavar": "VALUE"}
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "|".join(typing.get_args(hint))}
    return {"metavar": "N" if int in _alternatives(hint) else "VALUE"}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) or (hint,)


def _help(field: attrs.Attribute[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    shown = field.default not in (None, False, ()) and "default" not in text
    return f"{text} (default: {field.default})" if shown else text


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that a command line asks for; raises ConfigError or PluginError."""
    flags = {key: value for key, value in vars(args).items() if "." in key}
    key = os.environ.get("INTERLOCK_API_KEY")
    if key and "server.api_key" in flags and not flags["server.api_key"]:
        flags["server.api_key"] = (key,)
    return load_settings(named_plugins(args.plugins), args.config, flags, args.set)
