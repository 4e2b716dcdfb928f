"""Two-phase publication: a key is reserved when its content is scheduled, and visible after.

A cache plugin reserves keys for what a step is about to write. The engine commits the
reservations of a request when the step that wrote them is complete and accepted, and aborts them
when the request is preempted, cancelled or fails. `find` sees committed keys only, so nobody ever
reads what was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import attrs


@attrs.define(slots=True)
class _Reservation:
    key: Hashable
    value: Any
    num_tokens: int
    on_commit: Callable[[Hashable, Any], None] | None
    on_abort: Callable[[Hashable, Any], None] | None


class Ledger:
    """Keys with values, in two phases. Owners are request ids."""

    def __init__(self) -> None:
        self._committed: dict[Hashable, Any] = {}
        self._reserved: dict[str, list[_Reservation]] = {}

    def reserve(
        self,
        owner: str,
        key: Hashable,
        value: Any,
        *,
        num_tokens: int,
        on_commit: Callable[[Hashable, Any], None] | None = None,
        on_abort: Callable[[Hashable, Any], None] | None = None,
    ) -> None:
        """Promise that ``value`` is right once ``owner`` has ``num_tokens`` accepted tokens."""
        entry = _Reservation(key, value, num_tokens, on_commit, on_abort)
        self._reserved.setdefault(owner, []).append(entry)

    def commit(self, owner: str, num_tokens: int) -> None:
        """``owner`` now has ``num_tokens`` accepted and written tokens. Idempotent.

        A key that somebody else has committed meanwhile keeps its value: the later reservation
        is aborted, so that its owner can give back what it took for it.
        """
        pending = self._reserved.get(owner)
        if not pending:
            return
        due = [r for r in pending if r.num_tokens <= num_tokens]
        self._reserved[owner] = [r for r in pending if r.num_tokens > num_tokens]
        for entry in due:
            known = entry.key in self._committed
            if not known:
                self._committed[entry.key] = entry.value
            callback = entry.on_abort if known else entry.on_commit
            if callback:
                callback(entry.key, entry.value)

    def abort(self, owner: str) -> None:
        """Drop everything that ``owner`` has reserved and not committed. Idempotent."""
        for entry in self._reserved.pop(owner, ()):
            if entry.on_abort:
                entry.on_abort(entry.key, entry.value)

    def find(self, key: Hashable) -> Any | None:
        """The committed value of ``key``, or None. Pure."""
        return self._committed.get(key)

    def retract(self, key: Hashable) -> Any | None:
        """Forget a committed key (eviction); returns its value."""
        return self._committed.pop(key, None)

    @property
    def num_committed(self) -> int:
        return len(self._committed)

    @property
    def num_reserved(self) -> int:
        return sum(len(entries) for entries in self._reserved.values())
