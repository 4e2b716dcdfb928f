"""Who has which part of a dimension. Imports no torch."""

from __future__ import annotations


def share(total: int, unit: int, rank: int, size: int) -> tuple[int, int]:
    """Range ``[start, stop)`` of ``rank``: units as even as possible, the last one maybe short.

    A rank gets none if there are fewer units than ranks.
    """
    units = -(-total // unit)
    start, stop = units * rank // size, units * (rank + 1) // size
    return min(start * unit, total), min(stop * unit, total)
