"""What leaves the engine: wire records, and the text side of a request (`TextStream`)."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from interlock.engine.request import Request


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """Log-probability of one chosen token and of the most likely ones at its position.

    ``top`` lists ``(token_id, logprob)`` in descending order and has the requested length.
    ``rank`` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Timings(msgspec.Struct, array_like=True, gc=False):
    """Durations in seconds on the engine's monotonic clock."""

    queue: float
    prefill: float
    decode: float


class Output(msgspec.Struct, gc=False):
    """What one step produced for one request.

    ``text`` is the new text; concatenated over all outputs it is the whole completion.
    ``finish_reason`` is None while running, then one of ``stop``, ``length``, ``abort``,
    ``timeout``, ``error``.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timings: Timings | None = None
    stats: dict[str, dict[str, float]] | None = None
    """Counters of plugins about this request, by plugin name (drafted, accepted, …)."""


class StepStats(msgspec.Struct, gc=False):
    """One step: how much it did, and where its time went (seconds, monotonic clock)."""

    step: int
    num_rows: int
    num_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    plan_s: float
    forward_s: float
    sample_s: float
    commit_s: float


class EngineStats(msgspec.Struct):
    """State and totals of an engine. Totals only grow; gauges are of this moment."""

    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_usage: float = 0.0
    num_blocks: int = 0
    state_usage: float = 0.0
    """Share of the recurrent state slots in use; 0 without such layers."""
    num_states: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_tokens_total: int = 0
    preemptions_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    failed_requests_total: int = 0
    plan_seconds_total: float = 0.0
    forward_seconds_total: float = 0.0
    sample_seconds_total: float = 0.0
    commit_seconds_total: float = 0.0
    plugin_counters: dict[str, dict[str, float]] = {}

    def add(self, step: StepStats) -> None:
        """Add one step to the totals."""
        self.steps_total += 1
        self.computed_tokens_total += step.num_tokens
        self.generation_tokens_total += step.num_output_tokens
        self.draft_tokens_total += step.num_draft_tokens
        self.accepted_tokens_total += step.num_accepted_tokens
        self.plan_seconds_total += step.plan_s
        self.forward_seconds_total += step.forward_s
        self.sample_seconds_total += step.sample_s
        self.commit_seconds_total += step.commit_s


class EngineInfo(msgspec.Struct):
    """What an engine runs; constant once it has loaded."""

    model_name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    fingerprint: str
    eos_token_ids: list[int]
    num_parameters: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    tp: int = 1
    num_states: int = 0
    state_bytes_per_slot: int = 0
    """Bytes of one sequence's recurrent states, on one rank."""
    load_seconds: dict[str, float] = {}
    ops: dict[str, str] = {}


class TextStream:
    """Turns tokens into text as they come, and finds stop strings.

    Bytes of tokens are joined before they are decoded, so half a character is never shown; text
    that might be the beginning of a stop string is held back until it is not. The text given out,
    concatenated, is the same for every partition of the tokens into pushes.
    """

    __slots__ = ("_bytes_of", "_decoder", "_held", "_include", "_stops", "stopped_by")

    def __init__(
        self, bytes_of: Callable[[int], bytes], stops: Sequence[str] = (), include: bool = False
    ) -> None:
        self._bytes_of = bytes_of
        self._stops = tuple(stops)
        self._include = include
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that is now certain. Sets ``stopped_by`` when a stop string is complete."""
        return self._settle(self._decoder.decode(self._bytes_of(token_id)))

    def finish(self) -> str:
        """All text still held back; the end of half a character becomes U+FFFD."""
        text = self._settle(self._decoder.decode(b"", True))
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _settle(self, new: str) -> str:
        if not self._stops:
            return new
        if self.stopped_by is not None:
            return ""
        text = self._held + new
        # The stop string that is complete first wins, however the text was cut into pushes.
        found = [(text.find(s) + len(s), text.find(s), s) for s in self._stops if s in text]
        if found:
            _, at, stop = min(found)
            self.stopped_by, self._held = stop, ""
            return text[: at + len(stop)] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without completing it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


def final(request: Request, output: Output) -> Output:
    """Fill in what the last output of a request says about it as a whole."""
    now = time.monotonic()
    scheduled = request.first_scheduled or now
    first = request.first_token or now
    output.finish_reason = request.finish_reason
    output.stop_reason = request.stop_reason
    output.error = request.error
    output.num_prompt_tokens = request.num_prompt_tokens
    output.num_output_tokens = request.num_output_tokens
    output.num_cached_tokens = request.num_cached_tokens
    output.timings = Timings(scheduled - request.arrival, first - scheduled, now - first)
    return output
