"""Draw the README's picture: ``python docs/picture.py REPORT.json OUT.svg``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from interlock.bench.metrics import Spread
from interlock.bench.report import Measured, Report, spread_text


def picture(report: Report) -> str:
    """An SVG of total tokens per second, with paired ratios, by concurrency."""
    machine = report.machine
    load = report.loads[0].load
    table = Table(
        title=f"SmolLM2-135M-Instruct, {load.prompt_tokens} tokens in, {load.output_tokens} out",
        caption=f"{machine['cpu']}, {machine['cores']} cores; median and range of "
        f"{len(report.loads[0].configurations[0].bursts)} alternated runs",
    )
    for heading in ("requests at once", "engine", "total tokens/s", "TTFT ms", "TPOT ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for result in report.loads:
        for item in result.configurations:
            first = item is result.configurations[0]
            table.add_row(str(result.load.concurrency) if first else "", *_cells(item))
    console = Console(record=True, width=136, file=io.StringIO())
    console.print(table)
    svg = console.export_svg(title="interlock bench run --against transformers")
    # A picture in a README must not fetch fonts: any monospaced one will do.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _cells(item: Measured) -> list[str]:
    spreads = item.summary.spreads
    ratio = Spread.of(item.gains.get("total_tps", []))
    return [
        item.label,
        spread_text(spreads.get("total_tps")),
        spread_text(spreads.get("ttft"), 1000),
        spread_text(spreads.get("tpot"), 1000),
        f"{ratio.median:.2f}x [{ratio.min:.2f}..{ratio.max:.2f}]" if ratio else "",
    ]


if __name__ == "__main__":
    source, target = sys.argv[1:]
    report = msgspec.json.decode(Path(source).read_bytes(), type=Report)
    Path(target).write_text(picture(report), encoding="utf-8")
