"""The request bodies of the API, and what each field means to the engine.

Fields follow OpenAI's reference; the extras carry vLLM's names. A field that cannot be honoured
is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from interlock.engine.request import MAX_LOGPROBS, SamplingParams
from interlock.errors import RequestError
from interlock.server.fields import Int, check_depth, shorten

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_SALT = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions; chat has none."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating routes understand."""

    model: str | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    plugins: dict[str, Any] | None = None
    # Accepted because they ask for nothing of the answer: they label or file a request.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Accepted at the values that mean "nothing special".
    service_tier: str | None = None
    store: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Any = None
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text (``prompt``) or a conversation (``messages``), exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[Int]
    model: str | None = None
    skip_special_tokens: bool | None = None


_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def adopt_request_id(body: GenerationRequest, header: str | None) -> None:
    """Take over ``X-Request-Id`` of a client or proxy; what could not be an id is left alone."""
    if body.request_id is None and header and _REQUEST_ID.fullmatch(header):
        body.request_id = header


def completion_params(body: CompletionRequest, vocab_size: int) -> SamplingParams:
    """Sampling parameters of /v1/completions, in range for ``vocab_size``."""
    _check_common(body)
    if body.suffix:
        raise _refused("suffix", "only an empty suffix is supported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _refused("best_of", "it must equal n: all choices are returned")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    _check_count("logprobs", body.logprobs)
    return _params(body, vocab_size, max_tokens, body.logprobs, prompt_logprobs)


def chat_params(body: ChatRequest, vocab_size: int) -> SamplingParams:
    """Sampling parameters of /v1/chat/completions; without a limit, up to the context."""
    _check_common(body)
    _check_chat(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_count("top_logprobs", body.top_logprobs)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, name)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{name} must be at least 1", param=name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, vocab_size, max_tokens, logprobs, body.prompt_logprobs)


def plugin_options(body: GenerationRequest, plugins: tuple[str, ...]) -> dict[str, Any]:
    """`Request.extras`: the options of each loaded plugin by its name, and the cache salt."""
    options = dict(body.plugins or {})
    check_depth("plugins", options)
    for name in options:
        if name not in plugins:
            known = ", ".join(plugins) or "none"
            raise RequestError(
                f"plugins: {shorten(name)!r} is not loaded (loaded: {known})",
                param=f"plugins.{shorten(name)}",
            )
    if body.cache_salt is not None:
        if not 1 <= len(body.cache_salt) <= MAX_SALT:
            raise RequestError(f"cache_salt has 1 to {MAX_SALT} characters", param="cache_salt")
        options["cache_salt"] = body.cache_salt
    _check_portable(options)
    return options


def _check_portable(options: dict[str, Any]) -> None:
    try:
        msgspec.msgpack.encode(options)
    except OverflowError:
        raise RequestError("plugins: integers must fit into 64 bits", param="plugins") from None


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages with text parts joined, a line each. Raises RequestError naming the place."""
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        given = shorten(role) if isinstance(role, str) else type(role).__name__
        raise RequestError(
            f"{place}.role must be one of {', '.join(ROLES)}, not {given!r}", param=f"{place}.role"
        )
    check_depth(place, message)
    return {**message, "content": _content(f"{place}.content", message)}


def _content(place: str, message: dict[str, Any]) -> str | None:
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise RequestError(f"{place} is missing", param=place)
        return None if message.get("tool_calls") else ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text_part(f"{place}[{i}]", part) for i, part in enumerate(content))
    raise RequestError(f"{place} must be a string or a list of text parts", param=place)


def _text_part(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise RequestError(f"{place}: only parts of type 'text' are supported", param=place)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{place}.text must be a string", param=f"{place}.text")
    return text


def _params(
    body: GenerationRequest,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        **{name: value for name, value in given.items() if value is not None},
    )
    params.validate(vocab_size)
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
    return params


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                f"logit_bias: {shorten(key)!r} is not a token id", param="logit_bias"
            )
    return {int(key): value for key, value in given.items()}


def _check_count(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise RequestError(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}", param=name)


def _check_common(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if body.service_tier not in (None, "auto", "default"):
        raise _refused("service_tier", "only 'auto' and 'default' are supported")
    if body.store:
        raise _refused("store", "completions are not stored")
    if body.request_id is not None and not _REQUEST_ID.fullmatch(body.request_id):
        raise RequestError("request_id has 1 to 128 of A-Z a-z 0-9 . _ : -", param="request_id")
    if body.timeout_s is not None and not 0 < body.timeout_s <= 86400 * 7:
        raise RequestError("timeout_s must be above 0 and at most a week", param="timeout_s")
    if body.priority is not None and abs(body.priority) > 2**31:
        raise RequestError("priority must fit into 32 bits", param="priority")
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens < 1:
        raise RequestError(
            "truncate_prompt_tokens must be at least 1", param="truncate_prompt_tokens"
        )


def _check_chat(body: ChatRequest) -> None:
    if body.chat_template is not None:
        raise _refused("chat_template", "a template is code; the operator sets it at start")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError(
            "max_tokens and max_completion_tokens exclude each other", param="max_tokens"
        )
    if body.modalities not in (None, ["text"]):
        raise _refused("modalities", "only ['text'] is supported")
    check_depth("tools", body.tools)
    check_depth("chat_template_kwargs", body.chat_template_kwargs)
    _check_tool_choice(body)
    _check_response_format(body.response_format)


def _check_tool_choice(body: ChatRequest) -> None:
    if body.tool_choice is None:
        return
    if body.tool_choice not in ("none", "auto", "required"):
        raise _refused("tool_choice", "only 'none', 'auto' and 'required' are supported")
    if body.tool_choice != "none" and not body.tools:
        raise RequestError(f"tool_choice {body.tool_choice!r} needs tools", param="tool_choice")


def _check_response_format(response_format: dict[str, Any] | None) -> None:
    if response_format is None or response_format == {"type": "text"}:
        return
    kind = response_format.get("type")
    if kind == "json_schema" and not isinstance(response_format.get("json_schema"), dict):
        name = "response_format.json_schema"
        raise RequestError(f"{name} is missing or not an object", param=name)
    raise _refused("response_format", "only {'type': 'text'} is supported")


def _refused(name: str, reason: str) -> RequestError:
    return RequestError(f"{name}: {reason}", param=name, code="unsupported_parameter")
