"""`interlock bench run|ablate|compare-transformers`: speed, measured in turns."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.cli.console import print_json, progress_bars, table
from interlock.cli.options import add_settings, settings_of
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock.bench.report import LoadResult, Report
    from interlock.bench.run import Job
    from interlock.bench.spec import Load, Target
    from interlock.settings import Settings

AGAINST = """\
measure this configuration in turns with the first one and print paired ratios: settings that
differ ("plugins=none engine.dtype=float32"), a running server (url=http://127.0.0.1:8001,
optionally with model=NAME api_key=KEY), or transformers; may be repeated"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="BENCHMARK", required=True)
    run_parser = commands.add_parser("run", help="measure one configuration, or compare several")
    run_parser.add_argument("--against", action="append", default=[], help=AGAINST)
    run_parser.add_argument("--url", help="measure a running server instead of an engine")
    ablate_parser = commands.add_parser("ablate", help="what each plugin of --plugins buys")
    versus = commands.add_parser(
        "compare-transformers", help="run --against transformers, with the standard load"
    )
    quality = commands.add_parser("perplexity", help="how well held-out text is predicted")
    quality.add_argument("--against", action="append", default=[], help=AGAINST)
    quality.add_argument("--text", type=Path, metavar="FILE", help="(default: the benchmark's own)")
    quality.add_argument("--window", type=_positive, default=512, metavar="TOKENS")
    quality.add_argument("--windows", type=_positive, default=16, metavar="N", help="at most")
    quality.add_argument("--json", action="store_true", help="print JSON")
    add_settings(quality, "engine")
    quality.set_defaults(run=perplexity)
    for sub, action in ((run_parser, run), (ablate_parser, ablate), (versus, compare)):
        _add_load(sub)
        add_settings(sub, "engine")
        sub.set_defaults(run=action)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_numbers,
        default=[1, 4, 16],
        metavar="C,C,…",
        help="requests in flight (default: 1,4,16)",
    )
    load.add_argument("--prompt-tokens", type=_positive, default=1024, metavar="N")
    load.add_argument("--output-tokens", type=_positive, default=128, metavar="N")
    load.add_argument(
        "--num-requests", type=_positive, metavar="N", help="per repeat (default: the concurrency)"
    )
    load.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts share"
    )
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--seed", type=int, default=0, help="which prompts are cut from the text")
    load.add_argument("--stop-at-eos", action="store_true", help="outputs may end early")
    form = parser.add_argument_group("protocol")
    form.add_argument("--repeats", type=_positive, default=3, metavar="N")
    form.add_argument("--warmup", type=int, default=1, metavar="N", help="short runs, not counted")
    form.add_argument(
        "--max-others",
        type=float,
        metavar="SHARE",
        help="repeat a round in which other processes used more of the CPUs (0.08, for example)",
    )
    form.add_argument(
        "--no-floors", action="store_true", help="do not measure the machine's limits"
    )
    form.add_argument("--out", type=Path, metavar="FILE.json", help="write the whole report there")
    form.add_argument("--json", action="store_true", help="print the report as JSON")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number is expected, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    from interlock.bench.spec import parse_target

    base = _base(args)
    targets = [_named(base, args), *(parse_target(text, base) for text in args.against)]
    return _finish(args, _measure(args, targets))


def compare(args: argparse.Namespace) -> int:
    from interlock.bench.spec import parse_target

    base = _base(args)
    return _finish(args, _measure(args, [base, parse_target("transformers", base)]))


def perplexity(args: argparse.Namespace) -> int:
    from interlock.bench.perplexity import qualities, windows
    from interlock.bench.prompts import corpus
    from interlock.bench.spec import parse_target
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import resolve

    base = _base(args)
    targets = [base, *(parse_target(text, base) for text in args.against)]
    tokenizer = Tokenizer.load(resolve(_model(base)))
    text = corpus() if args.text is None else _read(args.text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = qualities(targets, windows(ids, args.window, args.windows), tokenizer)
    if args.json:
        print_json([_quality(item) for item in found])
        return 0
    headings = ["configuration", "tokens", "perplexity", "bits per byte", "over the first"]
    rows = [
        [q.label, str(q.tokens), f"{q.perplexity:.3f}", f"{q.bits_per_byte:.4f}", _worse(q)]
        for q in found
    ]
    table("", headings, rows)
    return 0


def _quality(item: Any) -> dict[str, Any]:
    import msgspec

    derived = {"perplexity": item.perplexity, "bits_per_byte": item.bits_per_byte}
    return {**msgspec.to_builtins(item), **derived}


def _worse(item: Any) -> str:
    """The log-likelihood over the first configuration's: all windows, and their range."""
    from interlock.bench.metrics import Spread

    spread = Spread.of(item.worse)
    return f"{spread.median:.4f} [{spread.min:.4f}..{spread.max:.4f}]" if spread else "-"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from None


def ablate(args: argparse.Namespace) -> int:
    from interlock.bench.ablate import variants

    base = _base(args)
    targets = variants(base, base.plugins)
    report = _measure(args, targets)
    code = _finish(args, report)
    if not args.json:
        _print_bought(report, targets)
    return code


def _base(args: argparse.Namespace) -> Target:
    """The first configuration: every setting that is not at its default, whatever gave it."""
    from interlock.bench.spec import Target

    settings = settings_of(args)
    flags = {key: _value(settings, key) for key in settings.sources}
    label = "interlock " + ",".join(settings.plugins) if settings.plugins else "interlock"
    return Target(label=label, plugins=settings.plugins, flags=flags)


def _value(settings: Settings, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(settings.section(section), name)


def _named(base: Target, args: argparse.Namespace) -> Target:
    if not args.url:
        return base
    from interlock.bench.spec import parse_target

    return parse_target(f"url={args.url}", base)


def _loads(args: argparse.Namespace) -> list[Load]:
    from interlock.bench.spec import Load

    return [
        Load(
            concurrency=concurrency,
            num_requests=max(args.num_requests or concurrency, concurrency),
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            temperature=args.temperature,
            ignore_eos=not args.stop_at_eos,
        )
        for concurrency in args.concurrency
    ]


def _measure(args: argparse.Namespace, targets: list[Target]) -> Report:
    from interlock.bench.prompts import PromptSource
    from interlock.bench.run import run_job
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import resolve

    with progress_bars() as bars:
        name = _model(targets[0])
        files = resolve(name, progress=bars.download(name) if bars else None)
    tokenizer = Tokenizer.load(files)
    source = PromptSource.from_corpus(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        shared_prefix=args.shared_prefix,
        seed=args.seed,
    )
    _check_writable(args.out)
    return run_job(_job(args, targets, files), source, _say)


def _model(target: Target) -> str:
    from interlock.settings import EngineSettings

    return str(target.flags.get("engine.model", EngineSettings().model))


def _job(args: argparse.Namespace, targets: list[Target], files: Any) -> Job:
    from interlock.bench.compare import Protocol
    from interlock.bench.run import Job
    from interlock.weights.config import load_config

    protocol = Protocol(args.repeats, args.warmup, args.max_others)
    return Job(targets, _loads(args), protocol, None if args.no_floors else load_config(files))


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _finish(args: argparse.Namespace, report: Report) -> int:
    """Write and print the report; 1 if something makes its numbers doubtful."""
    if args.out:
        _write(args.out, report)
    if args.json:
        print_json(report)
    else:
        _print(report)
    for problem in report.problems:
        print(f"interlock: error: {problem}", file=sys.stderr)
    return 1 if report.problems else 0


def _check_writable(path: Path | None) -> None:
    """Find out before the measurement, not after it, that its result cannot be kept."""
    try:
        if path:
            path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}") from None


def _write(path: Path, report: Report) -> None:
    import msgspec

    path.write_bytes(msgspec.json.format(msgspec.json.encode(report, enc_hook=str)))


def _print(report: Report) -> None:
    from interlock.bench.report import counter_rows, floor_rows, gain_rows, summary_rows

    machine = report.machine
    print(f"interlock {report.version} on {machine['cpu']}, {machine['cores']} cores")
    for result in report.loads:
        print()
        _print_rows(_title(result), summary_rows(result))
        _print_rows("paired ratios: median over repeats [min..max]", gain_rows(result))
        _print_rows("against this machine's floors", floor_rows(result))
    _print_rows("plugin counters", counter_rows(report))


def _title(result: LoadResult) -> str:
    load = result.load
    return (
        f"concurrency {load.concurrency}: {load.num_requests} requests of {load.prompt_tokens} in, "
        f"{load.output_tokens} out; medians [min..max] over repeats"
    )


def _print_rows(title: str, content: tuple[list[str], list[list[str]]]) -> None:
    headings, rows = content
    if rows:
        print(f"# {title}" if not sys.stdout.isatty() else "", end="\n")
        table(title, headings, rows)


def _print_bought(report: Report, targets: list[Target]) -> None:
    from interlock.bench.ablate import bought
    from interlock.bench.metrics import METRICS
    from interlock.bench.report import NAMES, spread_text

    plugins = max((target.plugins for target in targets), key=len)
    for result in report.loads:
        measured = {
            target.plugins: item.bursts
            for target, item in zip(targets, result.configurations, strict=True)
        }
        rows = [
            [b.plugin, NAMES[b.metric], spread_text(b.alone), spread_text(b.last)]
            for metric in METRICS
            for b in bought(plugins, measured, metric)
        ]
        heading = ["plugin", "metric", "alone / none", "all / all but it"]
        _print_rows(
            f"what each plugin bought at concurrency {result.load.concurrency}", (heading, rows)
        )
