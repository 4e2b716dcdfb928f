"""Which command is meant, and its arguments; imports nothing but that command's module."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from interlock import __version__
from interlock.errors import ConfigError


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "serve": Command("interlock.cli.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": Command("interlock.cli.chat", "talk with a model in the terminal"),
    "generate": Command("interlock.cli.generate", "complete a prompt and print the text"),
    "bench": Command("interlock.cli.bench", "measure speed, compare and ablate configurations"),
    "plugins": Command("interlock.cli.plugins", "list plugins with hooks, settings and counters"),
    "models": Command("interlock.cli.models", "list, download and inspect models"),
    "doctor": Command("interlock.cli.doctor", "check what this machine can do, with remedies"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are `ConfigError`s, so that they read like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see: {self.prog} --help)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line; the namespace's ``run`` is the function that executes it."""
    chosen = _command_word(argv)
    parser = Parser(
        prog="interlock",
        description="A small LLM serving engine whose every optimization is a plugin.",
    )
    parser.add_argument("--version", action="version", version=f"interlock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=_sentence(command.help))
        if name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    if chosen is not None and chosen not in COMMANDS:
        _add_plugin_commands(commands, chosen, argv)
    args, rest = parser.parse_known_args(argv)
    if rest:
        # argparse itself would point to the help of the program, not to that of the command.
        named = commands.choices.get(chosen or "", parser)
        named.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _command_word(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if not word.startswith("-")), None)


def _add_plugin_commands(commands: Any, chosen: str, argv: Sequence[str]) -> None:
    """Let the plugins that were asked for add commands; a word that is none is an error."""
    names = named_plugins(_option_value(argv, "--plugins"))
    if names:
        from interlock.plugins import Plugins

        Plugins.load(names).each("interlock_commands", subparsers=commands)
    if chosen not in commands.choices:
        raise ConfigError(unknown("command", chosen, list(commands.choices)))
    if names and chosen not in COMMANDS:
        commands.choices[chosen].add_argument("--plugins", help="the plugins, in order")


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is none of ``known``, with the nearest ones."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"unknown {what} {name!r}; did you mean {' or '.join(near)}?"
    return f"unknown {what} {name!r}; known: {', '.join(known)}"


def _option_value(argv: Sequence[str], option: str) -> str | None:
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(option + "="):
            return word.partition("=")[2]
    return None


def named_plugins(flag: str | None) -> tuple[str, ...] | None:
    """The plugin list of ``--plugins`` or, without it, of INTERLOCK_PLUGINS; None: not given."""
    text = os.environ.get("INTERLOCK_PLUGINS") or None if flag is None else flag
    if text is None:
        return None
    from interlock.plugins import parse_names

    return parse_names(text)
