"""Warm hooks, frozen when the engine starts: plain functions with the engine already bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlock.engine.outputs import StepStats
from interlock.engine.request import Request
from interlock.plugins import Plugins

if TYPE_CHECKING:
    from interlock.engine.engine import Engine


class WarmHooks:
    """One attribute per warm hook. Without implementations each is a function that does nothing."""

    __slots__ = (
        "kv_committed",
        "poll",
        "reclaim",
        "requests_finished",
        "requests_preempted",
        "step_done",
    )

    poll: Callable[[], None]
    kv_committed: Callable[[Sequence[tuple[Request, int, int]]], None]
    reclaim: Callable[[int, int], None]
    requests_finished: Callable[[Sequence[Request]], None]
    requests_preempted: Callable[[Sequence[Request]], None]
    step_done: Callable[[StepStats], None]

    def __init__(self, plugins: Plugins, engine: Engine) -> None:
        for name in self.__slots__:
            setattr(self, name, plugins.freeze(f"interlock_{name}", engine))
