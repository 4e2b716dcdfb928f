"""An interlock plugin: adds a constant to the logits of chosen tokens."""

from __future__ import annotations

import attrs

from interlock.errors import ConfigError
from interlock.hookspec import hookimpl
from interlock.settings import option


@attrs.frozen(kw_only=True)
class LogitBiasSettings:
    tokens: tuple[int, ...] = option((), "token ids whose logits are changed")
    bias: float = option(5.0, "added to each of those logits")


class LogitBias:
    api_version = 1

    def __init__(self) -> None:
        self.rows = 0

    @hookimpl
    def interlock_settings(self):
        return LogitBiasSettings

    @hookimpl
    def interlock_configure(self, section):
        if not section.tokens:
            raise ConfigError("logit_bias.tokens: give token ids: --set logit_bias.tokens=17,18")
        self.tokens, self.bias = list(section.tokens), section.bias

    @hookimpl
    def interlock_logits_processor(self, engine):
        vocab_size = engine.runner.geometry.vocab_size
        if not all(0 <= token < vocab_size for token in self.tokens):
            raise ConfigError(f"logit_bias.tokens: ids are below {vocab_size} with this model")
        return self

    def apply(self, requests, offsets, logits):
        self.rows += len(requests)
        logits[:, self.tokens] += self.bias
        return logits

    @hookimpl
    def interlock_counters(self):
        return {"rows_total": self.rows}
