"""Recurrent states around the forward pass: exports before it, settling drafts after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interlock.engine.batch import Plan, Row
from interlock.engine.request import Request
from interlock.engine.sampler import RowResult
from interlock.errors import PluginError
from interlock.extension import STATE_GRID, StateExports


def exports(
    plugins: Sequence[tuple[str, StateExports]], request: Request, start: int, stop: int
) -> list[tuple[int, int]]:
    """Where states are to be exported inside a prefill row, in order of position."""
    wanted: list[tuple[int, int]] = []
    for plugin, thing in plugins:
        for position, slot in thing.plan(request, start, stop):
            if not start < position < stop or (position - start) % STATE_GRID:
                raise PluginError(
                    f"plugin {plugin!r}: a state cannot be exported after {position} tokens of a "
                    f"row from {start} to {stop}; positions lie inside it, on a grid of "
                    f"{STATE_GRID} from its start"
                )
            wanted.append((position, slot))
    return sorted(wanted)


def settle(runner: Any, plan: Plan, results: Sequence[RowResult]) -> None:
    """Tell a runner with states how many tokens of each row count, if any row had drafts.

    The state of a verify row cannot be cut like a block table, so the runner keeps one for each
    of the row's tokens until it hears this.
    """
    if runner.geometry.num_states and any(row.draft_tokens for row in plan.rows):
        pairs = zip(plan.rows, results, strict=True)
        runner.settle(plan, [_kept(row, result) for row, result in pairs])


def _kept(row: Row, result: RowResult) -> int:
    """Tokens of a row that stay: all but the drafts that were rejected; 0 if the row failed."""
    if result.error is not None:
        return 0
    rejected = len(row.draft_tokens) - (len(result.accepted) - 1) if row.samples else 0
    return row.num_tokens - rejected
