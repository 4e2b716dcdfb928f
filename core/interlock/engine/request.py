"""What a user asks for (`SamplingParams`), and a request's life inside the engine (`Request`).

This module imports no torch: the HTTP process and the command line use it too.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import xxhash

from interlock.errors import RequestError

if TYPE_CHECKING:
    from interlock.engine.outputs import TextStream, TokenLogprob

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
SEED_RANGE = 2**63


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen.

    Neutral values (temperature 1, top_p 1, top_k 0, min_p 0, penalties 1/0/0) leave the model's
    distribution as it is. Temperature 0 is greedy decoding. All ranges are checked by `validate`.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reshapes_logits(self) -> bool:
        """Whether logits must be changed before temperature (penalties, bias, allowed ids)."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
        )

    def validate(self, vocab_size: int) -> None:
        """Raise `RequestError` naming the first field out of its documented range."""
        for name, low, high in _RANGES:
            _in_range(name, getattr(self, name), low, high)
        for name in ("max_tokens", "logprobs", "prompt_logprobs", "seed"):
            value = getattr(self, name)
            if value is not None:
                low, high = _OPTIONAL_RANGES[name]
                _in_range(name, value, low, high)
        _check_stops(self.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(self, name), vocab_size)
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("min_tokens", 0, 2**31),
    ("temperature", 0.0, 2.0),
    ("top_k", -1, 2**31),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    # top_p=0 is what clients send for "greedy"; it keeps the single most likely token.
    ("top_p", 0.0, 1.0),
)
_OPTIONAL_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-SEED_RANGE, SEED_RANGE - 1),
}


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {value}", param=name)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
    if any(not s for s in stops):
        raise RequestError("stop strings must not be empty", param="stop")
    if any(len(s) > MAX_STOP_LENGTH for s in stops):
        raise RequestError(f"a stop string has at most {MAX_STOP_LENGTH} characters", param="stop")


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError naming the first id that is no token of the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name}: token id {token} is out of vocabulary (0 to {vocab_size - 1})", param=name
            )


@attrs.define(slots=True, eq=False)
class Request:
    """One sequence from arrival to its last token.

    Owners: the caller sets the first block; the scheduler owns status, holds, block table and
    counters; the sampler reads ``rng_key``; only `Scheduler.commit` appends tokens.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    stream: int = 0
    """Which of several samples of one prompt this is (choice index): separates random streams."""
    deadline: float | None = None
    """`time.monotonic()` after which the request ends with finish reason ``timeout``."""
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """Options for plugins, by plugin name; the core never looks inside."""
    arrival: float = attrs.field(factory=time.monotonic)

    status: Status = Status.WAITING
    token_ids: list[int] = attrs.field(factory=list)
    draft_tokens: list[int] = attrs.field(factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    prefill_target: int = 0
    block_table: list[int] = attrs.field(factory=list)
    state_slot: int | None = None
    """Slot with the state of recurrent layers after ``num_computed_tokens`` tokens."""
    holds: dict[str, float | None] = attrs.field(factory=dict)
    num_preemptions: int = 0
    suspect_until: int = 0
    """Runs alone until so many tokens are computed: a step that it was part of has failed."""
    sequence_number: int = 0
    token_limit: int = 0
    """Sequence length at which generation ends; the scheduler sets it on arrival."""
    first_scheduled: float | None = None
    first_token: float | None = None

    text: TextStream | None = None
    prompt_logprobs: list[TokenLogprob | None] = attrs.field(factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    rng_key: int = 0

    def __attrs_post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.prefill_target = len(self.token_ids)
        self.rng_key = _rng_key(self)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_prefilling(self) -> bool:
        """Tokens known at admission are still to be computed (true again after a preemption)."""
        return self.num_computed_tokens < self.prefill_target

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt log-probabilities are asked for, and not all of them are known yet."""
        if self.params.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens

    def hold(self, name: str, deadline: float | None = None) -> None:
        """Keep the request from being scheduled until `release`; ends it after ``deadline``."""
        self.holds[name] = deadline

    def release(self, name: str) -> None:
        self.holds.pop(name, None)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


def _rng_key(request: Request) -> int:
    """64-bit key of a request's random stream.

    With a seed it depends on seed, prompt and choice only, so neighbours, batch position and
    restarts change nothing; without one it is fresh for every request of every process.
    """
    import array
    import os

    h = xxhash.xxh3_64()
    if request.params.seed is None:
        h.update(os.urandom(16))
    else:
        h.update(request.params.seed.to_bytes(9, "little", signed=True))
        h.update(array.array("q", request.prompt_token_ids).tobytes())
    h.update(request.stream.to_bytes(8, "little"))
    return h.intdigest()
