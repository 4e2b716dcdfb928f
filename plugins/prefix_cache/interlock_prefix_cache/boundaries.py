"""At which positions inside a prompt recurrent states are kept. Pure functions, asked by all sides.

A state can be exported only on the kernel's grid, counted from a row's first token, and strictly
inside the row; whoever plans, cuts or publishes asks `exportable`, so that nobody names a position
that another would not write.
"""

from __future__ import annotations

from collections.abc import Iterable

from interlock.extension import STATE_GRID

MOST = 2
"""States exported from one row: what the prefill kernel writes in a pass."""


def exportable(start: int, stop: int, position: int) -> bool:
    """Whether a row of tokens ``start`` to ``stop`` can export the state after ``position``."""
    return start < position < stop and (position - start) % STATE_GRID == 0


def on_grid(start: int, position: int) -> int:
    """The last grid position of a row that begins at ``start`` that is not beyond ``position``."""
    return start + (position - start) // STATE_GRID * STATE_GRID


def wanted(
    start: int, stop: int, end: int, *, interval: int | None = None, junction: int = 0
) -> list[int]:
    """Positions to export from a row, ascending, at most `MOST`; ``end`` is the prompt's length.

    A lookup never matches the last token, so the last position of use is ``end - 1``. The junction
    is where another request was seen to share this prefix; both count more than the interval.
    """
    asked: list[int] = []
    if stop >= end:
        asked.append(end - 1)
    if start < junction <= stop:
        asked.append(junction)
    found = _exports(start, stop, asked)
    if interval is not None and len(found) < MOST:
        steps = range(stop // interval * interval, start, -interval)
        found = list(dict.fromkeys([*found, *_exports(start, stop, steps)]))
    return sorted(found[:MOST])


def _exports(start: int, stop: int, positions: Iterable[int]) -> list[int]:
    grid = dict.fromkeys(on_grid(start, position) for position in positions)
    return [position for position in grid if exportable(start, stop, position)]


def cut(start: int, stop: int, end: int, block_size: int) -> int:
    """Where the old way ends a row: at the prompt's last block boundary, else at ``stop``."""
    boundary = (end - 1) // block_size * block_size
    return boundary if start < boundary < stop else stop
