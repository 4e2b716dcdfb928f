"""The section ``[mxfp4]``. Imports no torch."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from interlock.settings import option

IGNORED = (r"lm_head$", r"\.gate$", r"\.b_proj$", r"\.kv_b_proj$")
"""Layers that stay as they are: the head, routers, the small projection of KDA's beta, which loses
measurably in low precision, and MLA's latent-to-head matrix, which is multiplied into others."""


def _patterns(_: Any, field: attrs.Attribute[Any], patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"'{field.name}': {pattern!r} is no regular expression: {error}"
            ) from None


@attrs.frozen(kw_only=True)
class Mxfp4Settings:
    scope: Literal["stored", "experts", "linear", "all"] = option(
        "stored",
        "what to quantize while loading, beside what is stored in MXFP4 already",
    )
    ignore: tuple[str, ...] = option(
        IGNORED, "regular expressions of layers that are not quantized while loading", _patterns
    )
    finalize: Literal["deferred", "eager"] = option(
        "deferred", "where routed experts' rows are weighted and summed: by their consumer, or here"
    )
    tail: Literal["collective", "fused"] = option(
        "collective",
        "how ranks' unfinalized results are added: by a collective, or inside the tail's kernel "
        "(GPUs that map each other's memory)",
    )
    activations: Literal["bf16", "mxfp8"] = option(
        "bf16", "what the experts' products take: activations as they are, or in MXFP8"
    )

    def quantizes(self, kind: str, name: str) -> bool:
        """Whether a layer (``experts`` or ``linear``) that is stored otherwise is quantized."""
        if self.scope not in (kind, "all"):
            return False
        return not any(re.search(pattern, name) for pattern in self.ignore)
