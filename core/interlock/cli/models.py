"""`interlock models list|pull|inspect`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from interlock.cli.console import download_progress, print_json, progress_bars, size, table
from interlock.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="ACTION", required=True)
    listing = commands.add_parser("list", help="known models, and which are in the cache")
    listing.set_defaults(run=run_list)
    pull = commands.add_parser("pull", help="download a model into the cache")
    pull.add_argument("name", metavar="NAME", help="an alias that `models list` shows")
    pull.set_defaults(run=run_pull)
    inspect = commands.add_parser("inspect", help="architecture, tensors, tokenizer and memory")
    inspect.add_argument("name", metavar="MODEL", help="alias, folder, .gguf file or hub name")
    inspect.add_argument("--offline", action="store_true", help="download nothing")
    inspect.add_argument("--tp", type=int, default=1, metavar="N", help="ranks to share it")
    inspect.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of caches"
    )
    inspect.add_argument(
        "--device-memory", metavar="BYTES", help="of each rank's device, such as 288GiB"
    )
    inspect.set_defaults(run=run_inspect)
    for sub in (listing, pull, inspect):
        sub.add_argument("--json", action="store_true", help="print JSON")


def run_list(args: argparse.Namespace) -> int:
    from interlock.weights.resolve import cache_dir, describe_aliases

    known = describe_aliases()
    if args.json:
        print_json({"cache": str(cache_dir()), "models": known})
        return 0
    columns = ["model", "size", "licence", "in cache", "what it is"]
    rows = [
        [m["name"], size(m["bytes"]), m["license"], m["pulled"], m["description"]] for m in known
    ]
    table("", columns, rows)
    print(f"cache: {cache_dir()}")
    print("any folder with config.json and safetensors, .gguf file or hub name works too")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    from interlock.weights.resolve import pull

    with progress_bars() as bars:
        files = pull(args.name, download_progress(bars, args.name))
    if args.json:
        print_json({"name": files.name, "path": str(files.path), "revision": files.revision})
    else:
        print(files.path)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from interlock.models.inspect import describe
    from interlock.weights.resolve import resolve

    if args.tp < 1:
        raise ConfigError("--tp must be at least 1")
    memory = _memory(args.device_memory)
    with progress_bars() as bars:
        progress = download_progress(bars, args.name)
        files = resolve(args.name, progress=progress, offline=args.offline, needs_weights=False)
    description: dict[str, Any] = describe(
        files, tp=args.tp, dtype=args.dtype, device_memory=memory
    )
    if args.json:
        print_json(description)
    else:
        table("", ["field", "value"], flatten(description))
    return 0


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    from interlock.models.inspect import parse_bytes

    return parse_bytes(text)


def flatten(value: Any, prefix: str = "") -> list[list[str]]:
    """Nested mappings as rows ``[dotted name, text]``; long lists are cut."""
    if not isinstance(value, dict) or not value:
        return [[prefix, _text(prefix, value)]]
    rows = []
    for key, inner in value.items():
        rows += flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return rows


def _text(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name:
        return f"{value} ({size(value)})"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(str(item) for item in value[:8])
        return shown + (f", … ({len(value)} in all)" if len(value) > 8 else "")
    return str(value) if not isinstance(value, Path) else value.as_posix()
