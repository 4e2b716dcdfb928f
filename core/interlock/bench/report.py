"""A benchmark's result: the JSON record, and the tables made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from interlock.bench.compare import Contestant
from interlock.bench.floors import Floors
from interlock.bench.metrics import METRICS, Burst, Spread, Summary, gains, summarize
from interlock.bench.spec import Load

Row = list[str]

PYTHON_PARTS = ("plan_seconds_total", "commit_seconds_total")
STEP_PARTS = (*PYTHON_PARTS, "forward_seconds_total", "sample_seconds_total")


class Measured(msgspec.Struct):
    """One configuration under one load."""

    label: str
    summary: Summary
    bursts: list[Burst]
    floors: Floors | None = None
    python_share: float | None = None
    """Planning and committing as a share of all step time (0..1)."""
    gains: dict[str, list[float]] = {}
    """The first configuration over this one, per repeat; above 1 the first is better."""


class LoadResult(msgspec.Struct):
    load: Load
    configurations: list[Measured]


class Report(msgspec.Struct):
    """Everything that a reader needs to judge or repeat the measurement."""

    version: str
    machine: dict[str, Any]
    started: str
    configurations: list[dict[str, Any]]
    """Label, kind, plugins, settings, engine information and versions of each."""
    loads: list[LoadResult]
    rates: dict[str, Any] = {}
    """Measured bytes/s and flop/s, the basis of the floors."""
    problems: list[str] = []


def measured(contestant: Contestant, first: Contestant, index: int) -> Measured:
    bursts = contestant.bursts[index]
    versus = {} if contestant is first else gains(first.bursts[index], bursts)
    share = python_share(bursts)
    label = contestant.target.label
    return Measured(label, summarize(bursts), bursts, python_share=share, gains=versus)


def python_share(bursts: Sequence[Burst]) -> float | None:
    """Time of planning and committing over the time of whole steps; None if not reported."""
    total = sum(burst.engine.get(part, 0.0) for burst in bursts for part in STEP_PARTS)
    spent = sum(burst.engine.get(part, 0.0) for burst in bursts for part in PYTHON_PARTS)
    return spent / total if total else None


HEADINGS = {
    "ttft": ("TTFT ms", 1000.0),
    "tpot": ("TPOT ms", 1000.0),
    "itl": ("ITL ms", 1000.0),
    "latency": ("latency s", 1.0),
    "output_tps": ("output tok/s", 1.0),
    "total_tps": ("total tok/s", 1.0),
}
NAMES = {metric: heading.rpartition(" ")[0] for metric, (heading, _) in HEADINGS.items()}


def number(value: float) -> str:
    """Three significant digits without an exponent: 1234, 56.7, 0.89."""
    magnitude = abs(value)
    digits = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{value:.{digits}f}"


def spread_text(spread: Spread | None, scale: float = 1.0) -> str:
    """``median [min..max]``, or ``-`` when nothing was measured."""
    if spread is None:
        return "-"
    ends = f"[{number(spread.min * scale)}..{number(spread.max * scale)}]"
    return f"{number(spread.median * scale)} {ends}"


def summary_rows(result: LoadResult) -> tuple[Row, list[Row]]:
    """A row per configuration: each metric's median over repeats with its range, and p99."""
    headings = [
        "configuration",
        *(HEADINGS[m][0] for m in METRICS),
        "p99 TTFT/ITL ms",
        "MiB",
        "others",
    ]
    return headings, [_summary_row(item) for item in result.configurations]


def _summary_row(item: Measured) -> Row:
    spreads = item.summary.spreads
    cells = [spread_text(spreads.get(m), HEADINGS[m][1]) for m in METRICS]
    shares = [b.others_cpu for b in item.bursts if b.others_cpu is not None]
    others = f"{max(shares):.1%}" if shares else "-"
    memory = max(burst.resident_bytes for burst in item.bursts) >> 20
    p99 = f"{_p99(item, 'ttft')} / {_p99(item, 'itl')}"
    return [item.label, *cells, p99, str(memory) if memory else "-", others]


def _p99(item: Measured, metric: str) -> str:
    spread = item.summary.requests.get(metric)
    return number(spread.p99 * 1000) if spread else "-"


def gain_rows(result: LoadResult) -> tuple[Row, list[Row]]:
    """The first configuration against each other one: median of per-repeat ratios and range."""
    first = result.configurations[0].label
    rows = [
        [f"{first} vs {item.label}", *(_gain_text(item, m) for m in METRICS)]
        for item in result.configurations[1:]
    ]
    return ["x better (paired)", *(NAMES[m] for m in METRICS)], rows


def _gain_text(item: Measured, metric: str) -> str:
    spread = Spread.of(item.gains.get(metric, []))
    if spread is None:
        return "-"
    return f"{spread.median:.2f} [{spread.min:.2f}..{spread.max:.2f}]"


def floor_rows(result: LoadResult) -> tuple[Row, list[Row]]:
    """How many times its floor each configuration took, and the share of Python in a step."""
    headings = ["configuration", "burst floor s", "wall / floor", "TPOT / step floor", "python"]
    return headings, [_floor_row(item) for item in result.configurations if item.floors]


def _floor_row(item: Measured) -> Row:
    assert item.floors is not None
    walls = Spread.of(burst.wall for burst in item.bursts)
    tpot = item.summary.spreads.get("tpot")
    return [
        item.label,
        number(item.floors.burst_s),
        number(walls.median / item.floors.burst_s) if walls else "-",
        number(tpot.median / item.floors.decode_step_s) if tpot else "-",
        "-" if item.python_share is None else f"{item.python_share:.1%}",
    ]


def counter_rows(report: Report) -> tuple[Row, list[Row]]:
    """What the plugins counted during the measured repeats, summed."""
    sums: dict[tuple[str, str, str], float] = {}
    for result in report.loads:
        for item in result.configurations:
            for burst in item.bursts:
                _add_counters(sums, item.label, burst)
    rows = [[*key, number(value)] for key, value in sums.items()]
    return ["configuration", "plugin", "counter", "moved by"], rows


def _add_counters(sums: dict[tuple[str, str, str], float], label: str, burst: Burst) -> None:
    for plugin, counters in burst.counters.items():
        for name, value in counters.items():
            key = (label, plugin, name)
            # What ends in _now is a level, not a count.
            sums[key] = value if name.endswith("_now") else sums.get(key, 0.0) + value
