"""What is measured (`Target`) and under which load (`Load`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec

from interlock.errors import ConfigError

Kind = Literal["engine", "url", "transformers"]


class Load(msgspec.Struct, frozen=True):
    """One closed loop: ``concurrency`` requests are in flight until ``num_requests`` are done."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True


@attrs.frozen(kw_only=True)
class Target:
    """A configuration under test.

    ``engine`` runs in a subprocess of its own with ``plugins``, ``flags`` and ``sets`` (as for
    `load_settings`), ``transformers`` likewise with the engine settings among them, and ``url`` is
    a server that already runs.
    """

    kind: Kind = "engine"
    label: str = "interlock"
    plugins: tuple[str, ...] = ()
    flags: Mapping[str, Any] = attrs.field(factory=dict)
    sets: tuple[str, ...] = ()
    url: str = ""
    model: str | None = None
    api_key: str | None = None


def parse_target(text: str, base: Target) -> Target:
    """The configuration named by ``--against``.

    ``transformers``; ``url=http://host:port [model=NAME] [api_key=KEY]``; or settings that differ
    from ``base``, such as ``plugins=none engine.dtype=float32``. Raises ConfigError.
    """
    words = shlex.split(text)
    if words == ["transformers"]:
        return attrs.evolve(base, kind="transformers", label="transformers", plugins=())
    pairs = [_pair(word, text) for word in words]
    if not pairs:
        raise ConfigError("--against is empty; name transformers, url=… or settings")
    given = dict(pairs)
    return _url_target(given, text, base) if "url" in given else _variant(pairs, text, base)


def _pair(word: str, text: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"--against {text!r}: {word!r} is neither transformers nor key=value; for example "
            '"plugins=none engine.dtype=float32" or url=http://127.0.0.1:8001'
        )
    return key, value


def _url_target(given: Mapping[str, str], text: str, base: Target) -> Target:
    wrong = sorted(set(given) - {"url", "model", "api_key"})
    if wrong:
        raise ConfigError(
            f"--against {text!r}: {', '.join(wrong)} cannot be set on a running server"
        )
    if not given["url"].startswith(("http://", "https://")):
        raise ConfigError(f"--against {text!r}: the url must begin with http:// or https://")
    return attrs.evolve(
        base,
        kind="url",
        label=given["url"],
        url=given["url"].rstrip("/").removesuffix("/v1"),
        model=given.get("model"),
        api_key=given.get("api_key"),
        plugins=(),
    )


def _variant(pairs: Sequence[tuple[str, str]], text: str, base: Target) -> Target:
    from interlock.plugins import parse_names

    plugins: Sequence[str] = base.plugins
    sets = []
    for key, value in pairs:
        if key == "plugins":
            plugins = parse_names(value)
        elif "." in key:
            sets.append(f"{key}={value}")
        else:
            raise ConfigError(f"--against {text!r}: {key!r}: write plugins=… or section.key=value")
    variant = with_plugins(base, plugins)
    return attrs.evolve(variant, label=text, sets=(*base.sets, *sets))


def with_plugins(target: Target, plugins: Sequence[str]) -> Target:
    """``target`` with exactly these plugins; settings of plugins that are left out go too."""
    known = {"engine", *plugins}
    kept = {k: v for k, v in target.flags.items() if k.partition(".")[0] in known}
    return attrs.evolve(target, plugins=tuple(plugins), flags=kept)
