"""The section ``[prefix_cache]``. Imports no torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as v

from interlock.settings import option


@attrs.frozen(kw_only=True)
class PrefixCacheSettings:
    checkpoints: Literal["internal", "split", "off"] = option(
        "internal",
        "recurrent states inside a prompt: exported in the same pass, by a pass of their own up to "
        "there, or only those that requests leave behind at their ends",
    )
    interval: int | None = option(
        None,
        "also keep a state every so many tokens of a prompt (default: near its end alone)",
        v.optional(v.ge(16)),
    )
    salt: str | None = option(
        None,
        "mixed into all keys: caches of another salt are never shared",
        v.optional(v.min_len(1)),
    )
