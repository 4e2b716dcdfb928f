"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from typing import Any

from interlock.engine.outputs import TokenLogprob

FLOOR = -9999.0
"""OpenAI's stand-in for a probability of zero: JSON has no infinity."""

TokenText = Callable[[int], tuple[str, bytes]]


def finite(logprob: float) -> float:
    return FLOOR if math.isnan(logprob) else max(logprob, FLOOR)


def chat_logprobs(entries: Sequence[TokenLogprob], text: TokenText) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, text),
            "top_logprobs": [_chat_token(token, value, text) for token, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    shown, raw = text(token_id)
    return {"token": shown, "logprob": finite(logprob), "bytes": list(raw)}


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], text: TokenText
) -> list[dict[str, Any] | None]:
    """The shape of vLLM: per prompt token ``{token_id: {logprob, rank, decoded_token}}``."""
    return [None if entry is None else _ranked(entry, text) for entry in entries]


def _ranked(entry: TokenLogprob, text: TokenText) -> dict[str, Any]:
    rows = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, start=1)]
    rows.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token): {"logprob": finite(value), "rank": rank, "decoded_token": text(token)[0]}
        for token, value, rank in rows
    }


class LegacyLogprobs:
    """The completions shape, token by token: offsets count characters of the returned text."""

    def __init__(self, text: TokenText, hidden: frozenset[int] = frozenset()) -> None:
        self._text = text
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def rows(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """Rows for the next tokens; None stands for the first token of a prompt."""
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._top(e) for e in entries],
            "text_offset": [self._advance(token) for token in token_ids],
        }

    def _advance(self, token_id: int) -> int:
        start = self._offset
        if token_id not in self._hidden:
            self._offset += len(self._decoder.decode(self._text(token_id)[1]))
        return start

    def _name(self, token_id: int) -> str:
        raw = self._text(token_id)[1]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in entry.top:
            top.setdefault(self._name(token), finite(value))
        top.setdefault(self._name(entry.token_id), finite(entry.logprob))
        return top


def join_legacy(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several `LegacyLogprobs.rows` as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [row for part in parts for row in part[name]] for name in names}
