"""The prefix cache as tests configure it, in this process, and look into it."""

from __future__ import annotations

from interlock.hookspec import hookimpl
from interlock_prefix_cache import PrefixCache, PrefixCacheSettings


class Configured(PrefixCache):
    """The plugin with options of its own, where an engine's settings have no section for it."""

    def __init__(self, **options) -> None:
        super().__init__()
        self._options = PrefixCacheSettings(**options)

    @hookimpl
    def interlock_configure(self, section):
        super().interlock_configure(section or self._options)

    def held(self) -> list[int]:
        return self.cache.held()

    def held_states(self) -> list[int]:
        return self.cache.held_states()

    @property
    def counts(self):
        return self.cache.counts
