"""Prefixes that are never computed twice, with recurrent states exported inside one prefill pass.

Imports no torch: the command line loads this module to learn the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interlock.hookspec import hookimpl
from interlock_prefix_cache.settings import PrefixCacheSettings

if TYPE_CHECKING:
    import torch

    from interlock.engine.engine import Engine
    from interlock.engine.request import Request
    from interlock_prefix_cache.source import Cache, Spans

__all__ = ["PrefixCache", "PrefixCacheSettings"]


class PrefixCache:
    """The plugin: see docs/prefix-cache.md."""

    api_version = 1

    def __init__(self) -> None:
        self._settings = PrefixCacheSettings()
        self.cache: Cache | None = None

    @hookimpl
    def interlock_settings(self) -> type[PrefixCacheSettings]:
        return PrefixCacheSettings

    @hookimpl
    def interlock_configure(self, section: PrefixCacheSettings | None) -> None:
        self._settings = section or PrefixCacheSettings()

    @hookimpl
    def interlock_kernels(
        self, device: torch.device, dtype: torch.dtype
    ) -> Mapping[tuple[str, str], Callable[..., Any]]:
        """On GPUs the prefill that exports states in its pass; float64 keeps the core's."""
        import torch

        if device.type != "cuda" or dtype == torch.float64:
            return {}
        from interlock_prefix_cache.kernels.prefill import kda_chunk

        return {("kda_chunk", "cuda"): kda_chunk}

    @hookimpl
    def interlock_check_options(self, options: Any) -> None:
        from interlock_prefix_cache.source import check_options

        check_options(options)

    @hookimpl
    def interlock_kv_source(self, engine: Engine) -> Cache:
        return self._of(engine)

    @hookimpl
    def interlock_state_exports(self, engine: Engine) -> Cache | None:
        return self._of(engine) if engine.runner.geometry.num_states else None

    @hookimpl
    def interlock_chunk_limit(self, engine: Engine) -> Cache | None:
        return self._of(engine) if self._settings.checkpoints == "split" else None

    @hookimpl
    def interlock_kv_committed(self, spans: Spans) -> None:
        self._open.committed(spans)

    @hookimpl
    def interlock_reclaim(self, num_blocks: int, num_states: int) -> None:
        self._open.reclaim(num_blocks, num_states)

    @hookimpl
    def interlock_requests_preempted(self, requests: Sequence[Request]) -> None:
        self._open.preempted(requests)

    @hookimpl
    def interlock_requests_finished(self, requests: Sequence[Request]) -> None:
        self._open.finished(requests)

    @hookimpl
    def interlock_counters(self) -> dict[str, float]:
        return {} if self.cache is None else self.cache.counters()

    @hookimpl
    def interlock_close(self) -> None:
        if self.cache is not None:
            self.cache.close()

    def _of(self, engine: Engine) -> Cache:
        """The engine's cache; made by whichever hook comes first."""
        if self.cache is None:
            from interlock_prefix_cache.source import Cache

            self.cache = Cache(engine, self._settings)
            if engine.runner.geometry.num_states and self._settings.checkpoints == "off":
                print(
                    "prefix_cache: with checkpoints=off a prompt is reused only by requests that "
                    "continue a whole former one: this model's layers go on from states",
                    file=sys.stderr,
                )
        return self.cache

    @property
    def _open(self) -> Cache:
        assert self.cache is not None, "hooks are called once the engine is complete"
        return self.cache
