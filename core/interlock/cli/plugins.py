"""`interlock plugins`: what is installed, what is enabled, and what it has done."""

from __future__ import annotations

import argparse
from typing import Any

from interlock.cli.console import print_json, table
from interlock.cli.options import add_settings, settings_of
from interlock.errors import InterlockError

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--url", help="ask a running server, which also has counters (key: $INTERLOCK_API_KEY)"
    )
    add_settings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    listing = describe(args)
    if args.json:
        print_json(listing)
        return 0
    _print_plugins(listing)
    _print_settings(listing)
    _print_counters(listing)
    return 0


def describe(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every installed plugin, the enabled ones first and in order, with hooks and settings.

    Plugins that are not enabled are never imported, so only their metadata is known.
    """
    from interlock.plugins import discover

    enabled = _from_server(args.url) if args.url else _enabled(args)
    names = {plugin["name"] for plugin in enabled}
    others = [info for info in discover() if info.name not in names]
    return enabled + [_installed(info) for info in others]


def _enabled(args: argparse.Namespace) -> list[dict[str, Any]]:
    import msgspec

    from interlock.plugins import Plugins
    from interlock.settings import describe as describe_settings

    settings = settings_of(args)
    sections = describe_settings(settings)
    return [
        {
            **msgspec.to_builtins(report),
            "enabled": True,
            "settings": sections.get(report.name, {}),
        }
        for report in Plugins.load(settings.plugins).reports()
    ]


def _installed(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "hooks": None,
        "counters": {},
        "enabled": False,
        "settings": {},
    }


def _from_server(url: str) -> list[dict[str, Any]]:
    import os

    import httpx

    key = os.environ.get("INTERLOCK_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = url.rstrip("/").removesuffix("/v1") + "/plugins"
    try:
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT_S).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise InterlockError(f"{address}: {error}; is `interlock serve` running there?") from None
    return [_served(plugin) for plugin in answer.get("plugins", [])]


def _served(plugin: dict[str, Any]) -> dict[str, Any]:
    return {"hooks": [], "counters": {}, "settings": {}, **plugin, "enabled": True}


def _print_plugins(listing: list[dict[str, Any]]) -> None:
    columns = ["plugin", "enabled", "version", "distribution", "hooks"]
    rows = [
        [p["name"], p["enabled"], p["version"], p["distribution"], _hooks(p["hooks"])]
        for p in listing
    ]
    if rows:
        table("", columns, rows)
    else:
        print("no plugin is installed")


def _hooks(hooks: list[str] | None) -> str:
    if hooks is None:
        return "(not imported)"
    return " ".join(hook.removeprefix("interlock_") for hook in hooks) or "-"


def _print_settings(listing: list[dict[str, Any]]) -> None:
    rows = [
        [f"{p['name']}.{name}", s["value"], s["default"], s["source"], s["help"]]
        for p in listing
        for name, s in p["settings"].items()
    ]
    if rows:
        print()
        table("", ["setting", "value", "default", "source", "meaning"], rows)


def _print_counters(listing: list[dict[str, Any]]) -> None:
    rows = [
        [p["name"], name, f"{value:g}"] for p in listing for name, value in p["counters"].items()
    ]
    if rows:
        print()
        table("", ["plugin", "counter", "value"], rows)
