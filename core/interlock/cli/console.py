"""What commands print: plain text when piped, tables and progress bars on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def warn(message: str) -> None:
    print(f"interlock: {message}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print ``value`` (msgspec, attrs or plain) as indented JSON."""
    import msgspec

    plain = msgspec.to_builtins(value, enc_hook=str, str_keys=True)
    print(json.dumps(plain, indent=2, ensure_ascii=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; on a pipe, one tab-separated line per row, so that tools can cut it."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(_cell(cell) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title or None, title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(_cell(cell) for cell in row))
    Console(markup=False, highlight=False).print(grid)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def size(count: float) -> str:
    """A number of bytes for people: ``98.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def progress_bars() -> Iterator[ProgressBars | None]:
    """Progress bars on stderr while the block runs; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBars(progress)


def download_progress(bars: ProgressBars | None, name: str) -> Callable[[int, int], None]:
    """Progress of a download: its bar, or without a terminal one line when it begins."""
    if bars is not None:
        return bars.download(name)
    announced: list[bool] = []

    def update(_: int, total: int) -> None:
        if not announced:
            announced.append(True)
            warn(f"downloading {name} ({size(total)})")

    return update


class ProgressBars:
    """Bars on stderr, each made by its first update."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def download(self, name: str) -> Callable[[int, int], None]:
        """A callable that takes bytes done and bytes in all."""

        def update(done: int, total: int) -> None:
            detail = f"{size(done)} of {size(total)}"
            self._show(f"Downloading {name}", done / max(total, 1), detail)

        return update

    def load(self, what: str, share: float) -> None:
        """Show how far (0 to 1) something is; ``what`` may change on the way."""
        self._show("Loading", share, what)

    def _show(self, title: str, share: float, detail: str) -> None:
        if title not in self._tasks:
            self._tasks[title] = self._progress.add_task(title, total=1.0, detail="")
        self._progress.update(self._tasks[title], completed=share, detail=detail)
