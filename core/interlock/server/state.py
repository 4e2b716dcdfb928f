"""What the routes share: settings, engine client, front end, and how far the server's life is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import attrs

from interlock.server.client import EngineClient, EngineState
from interlock.server.errors import NotFoundError, UnavailableError
from interlock.server.fields import shorten
from interlock.server.frontend import Frontend
from interlock.server.metrics import Metrics
from interlock.settings import Settings

SHUTTING_DOWN = "the server is shutting down"


@attrs.define
class ServerState:
    """One HTTP process. ``frontend`` is None until the model's files are there."""

    settings: Settings
    client: EngineClient
    metrics: Metrics
    frontend: Frontend | None = None
    draining: bool = False
    generating: int = 0
    created: int = attrs.field(factory=lambda: int(time.time()))
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)

    def ready_frontend(self) -> Frontend:
        """The front end. Raises UnavailableError while the server cannot answer prompts."""
        if self.draining:
            raise UnavailableError(SHUTTING_DOWN, code="shutting_down", retry_after_s=5)
        self.client.check_available()
        if self.frontend is None:
            raise UnavailableError(
                "the model is being loaded", code="engine_loading", retry_after_s=5
            )
        return self.frontend

    def check_model(self, asked: str | None) -> None:
        """Raise NotFoundError unless ``asked`` is the served model (absent: it is)."""
        name = self.frontend.model_name if self.frontend else ""
        if asked not in (None, name):
            raise NotFoundError(
                f"the model {shorten(asked or '')!r} does not exist; this server has {name!r}",
                param="model",
                code="model_not_found",
            )

    def readiness(self) -> dict[str, Any]:
        """Why the server is ready or not, for /ready."""
        if self.draining:
            return {"ready": False, "reason": SHUTTING_DOWN}
        state = self.client.state
        if state is EngineState.READY and self.frontend is not None:
            return {"ready": True}
        reason = self.client.death if state is EngineState.DEAD else f"the engine is {state.value}"
        return {"ready": False, "reason": reason}

    def begin(self) -> None:
        self.generating += 1
        self.idle.clear()

    def end(self) -> None:
        self.generating -= 1
        if not self.generating:
            self.idle.set()
