"""`interlock models list|pull|inspect|quantize`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interlock.cli.console import download_progress, print_json, progress_bars, size, table
from interlock.errors import ConfigError

QUANTIZERS = "interlock.quantizers"
"""Entry points ``format name = function(files, target, scope, ignore, progress) -> rows``."""


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
    shrink = commands.add_parser("quantize", help="write a copy with quantized weights")
    shrink.add_argument("name", metavar="SRC", help="alias, folder, .gguf file or hub name")
    shrink.add_argument("target", metavar="DST", type=Path, help="folder to write")
    shrink.add_argument("--format", help="of the weights (default: the only one installed)")
    shrink.add_argument("--scope", default="all", choices=("experts", "linear", "all"))
    shrink.add_argument(
        "--ignore", action="append", metavar="REGEX", help="modules to keep; may be repeated"
    )
    shrink.set_defaults(run=run_quantize)
    for sub in (listing, pull, inspect, shrink):
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


def run_quantize(args: argparse.Namespace) -> int:
    """The work is an installed package's: its entry point in the group `QUANTIZERS`."""
    import attrs

    from interlock.weights.export import new_folder
    from interlock.weights.resolve import resolve

    quantize = _quantizer(args.format)
    _check_patterns(args.ignore or ())
    with progress_bars() as bars:
        files = resolve(args.name, progress=download_progress(bars, args.name))
        step = bars.load if bars else None
        with new_folder(args.target) as folder:
            report = quantize(files, folder, args.scope, args.ignore, step)
    if args.json:
        print_json([attrs.asdict(row) for row in report])
        return 0
    columns = ["weight", "shape", "relative error", "largest error"]
    rows = [
        [r.name, "x".join(map(str, r.shape)), f"{r.relative_error:.2%}", f"{r.largest_error:.4g}"]
        for r in report
    ]
    table("", columns, rows)
    print(f"wrote {args.target}")
    return 0


def _quantizer(name: str | None) -> Any:
    import importlib.metadata

    found = {point.name: point for point in importlib.metadata.entry_points(group=QUANTIZERS)}
    known = ", ".join(sorted(found)) or "none"
    if name is None and len(found) != 1:
        raise ConfigError(f"--format: name one; installed: {known}")
    name = name or next(iter(found))
    if name not in found:
        raise ConfigError(f"--format {name}: no such format is installed; installed: {known}")
    return found[name].load()


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--ignore {pattern!r} is no regular expression: {error}") from None


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
