"""How many tokens a step may still take."""

from __future__ import annotations

import attrs


@attrs.define(slots=True)
class Budget:
    """What is left of a step: target tokens, and input positions including drafting's."""

    tokens: int
    inputs: int

    def room(self, slots: int) -> int:
        return min(self.tokens, self.inputs - slots)

    def charge(self, tokens: int, slots: int) -> None:
        self.tokens -= tokens
        self.inputs -= tokens + slots
