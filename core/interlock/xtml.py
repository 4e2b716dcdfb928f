"""Kimi K3's chat format: messages as tags whose brackets are single tokens. Imports no torch.

A tag is ``<|open|>name key="value"<|sep|>``, and ``<|close|>name<|sep|>`` closes it. A message ends
with ``<|end_of_msg|>``. There is no Jinja template: a conversation becomes segments, each encoded
by itself, and only the four brackets become control tokens. So no content, whatever it spells, can
open or close anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs

from interlock.errors import RequestError

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
BRACKETS: Final = (OPEN, CLOSE, SEP, END)
THINK, RESPONSE = "think", "response"
EFFORTS: Final = ("low", "medium", "high", "max")
DEFAULT_EFFORT: Final = "max"
_OPTIONS: Final = ("thinking", "thinking_effort")

Message = Mapping[str, Any]


class Segment(NamedTuple):
    text: str
    control: bool = False


@attrs.frozen(kw_only=True)
class ChatOptions:
    """What a request asks for beside its messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    thinking: bool = True
    effort: str = DEFAULT_EFFORT
    opens: bool = True
    """Whether the assistant's message is opened behind the conversation."""
    continues: bool = False
    """Whether the last message, the assistant's, is left open to be continued."""

    @property
    def channel(self) -> str:
        """The channel that the model's output begins in; empty if none is open."""
        if self.continues:
            return RESPONSE
        return (THINK if self.thinking else RESPONSE) if self.opens else ""


def options_of(
    kwargs: Mapping[str, Any], defaults: Mapping[str, Any], effort: str | None
) -> dict[str, Any]:
    """``thinking`` and ``effort`` from a request's chat_template_kwargs and reasoning_effort.

    ``none`` (OpenAI's value) is no thinking at all, ``minimal`` the least there is.
    """
    unknown = sorted(set(kwargs) - set(_OPTIONS))
    if unknown:
        raise RequestError(
            f"chat_template_kwargs: {unknown[0][:80]!r} is not known; this model's chat format "
            f"knows {', '.join(_OPTIONS)}",
            param="chat_template_kwargs",
        )
    given = {**defaults, **kwargs}
    thinking, level = given.get("thinking", True), given.get("thinking_effort", DEFAULT_EFFORT)
    if effort is not None:
        thinking = effort != "none"
        level = {"minimal": "low", "none": DEFAULT_EFFORT, "xhigh": "max"}.get(effort, effort)
    if not isinstance(thinking, bool):
        raise RequestError(
            "chat_template_kwargs.thinking must be true or false", param="chat_template_kwargs"
        )
    if level not in EFFORTS:
        name = "chat_template_kwargs" if effort is None else "reasoning_effort"
        raise RequestError(f"{name}: effort must be one of {', '.join(EFFORTS)}", param=name)
    return {"thinking": thinking, "effort": level}


def render(messages: Sequence[Message], options: ChatOptions) -> list[Segment]:
    """The segments of a conversation. Raises `RequestError` naming the message at fault."""
    segments: list[Segment] = []
    if options.tools:
        segments += _system("tool-declare", _tool_declaration(options.tools))
    if options.thinking:
        segments += _system("thinking-effort", _effort(options.effort))
    closed = messages[:-1] if options.continues else messages
    segments += _conversation(closed, options)
    if options.tools and options.tool_choice in _TOOL_CHOICE:
        segments += _system("tool-choice", _TOOL_CHOICE[options.tool_choice])
    if options.continues:
        last = len(messages) - 1
        return [
            *segments,
            *_open("message", role="assistant"),
            *_unclosed(last, messages[last], options),
        ]
    if options.opens:
        segments += [*_open("message", role="assistant"), *_open(options.channel)]
    return segments


def _open(tag: str, **attributes: str) -> list[Segment]:
    parts = [Segment(OPEN, control=True), Segment(tag)]
    for key, value in attributes.items():
        parts += [Segment(f" {key}"), Segment('="'), Segment(escape(value)), Segment('"')]
    return [*parts, Segment(SEP, control=True)]


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, control=True), Segment(tag), Segment(SEP, control=True)]


def _within(tag: str, inner: Iterable[Segment], **attributes: str) -> list[Segment]:
    return [*_open(tag, **attributes), *inner, *_close(tag)]


def _message(inner: Iterable[Segment], **attributes: str) -> list[Segment]:
    return [*_within("message", inner, **attributes), Segment(END, control=True)]


def escape(value: str) -> str:
    """An attribute's value; ``unescape`` gives it back."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


# -- messages of the system ----------------------------------------------------------------------


def _system(kind: str, text: str) -> list[Segment]:
    return _message([Segment(text)], role="system", type=kind)


def _tool_declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return (
        f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{listed}\n```"
    )


def _effort(effort: str) -> str:
    return (
        "`thinking_effort` guides on how much to think in your thinking channel (not including the "
        "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )


_TOOL_CHOICE: Final = {
    "required": (
        "The system is invoked with `tool_choice=required`.\n"
        "You MUST call tools in the next message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\n"
        "You MUST NOT call any tools in the next message."
    ),
}


# -- the conversation ----------------------------------------------------------------------------


def _conversation(messages: Sequence[Message], options: ChatOptions) -> list[Segment]:
    segments: list[Segment] = []
    calls: list[Mapping[str, Any]] = []
    results: list[tuple[int, Message]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role != "tool" and results:
            segments += _results(results, calls)
            results = []
        if role == "tool":
            results.append((index, message))
        elif role == "assistant":
            calls = _calls(f"messages[{index}].tool_calls", message.get("tool_calls"))
            segments += _assistant(index, message, calls, options)
        elif role == "function":
            raise RequestError(
                f"messages[{index}].role: 'function' is out of use; send role 'tool'",
                param=f"messages[{index}].role",
            )
        else:
            speaker = "user" if role == "user" else "system"
            segments += _message([Segment(_content(message))], role=speaker)
    return segments + (_results(results, calls) if results else [])


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _assistant(
    index: int, message: Message, calls: Sequence[Mapping[str, Any]], options: ChatOptions
) -> list[Segment]:
    inner = _thought(index, message, options)
    inner += _within(RESPONSE, [Segment(_content(message))])
    if calls:
        places = [f"messages[{index}].tool_calls[{i}]" for i in range(len(calls))]
        told = [_call(p, i, c) for i, (p, c) in enumerate(zip(places, calls, strict=True), 1)]
        inner += _within("tools", [segment for call in told for segment in call])
    return _message(inner, role="assistant")


def _thought(index: int, message: Message, options: ChatOptions) -> list[Segment]:
    if not options.thinking:
        return []
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(thought, str):
        place = f"messages[{index}].reasoning_content"
        raise RequestError(f"{place} must be a string", param=place)
    return _within(THINK, [Segment(thought)])


def _unclosed(last: int, message: Message, options: ChatOptions) -> list[Segment]:
    thought = _thought(last, message, options)
    return [*thought, *_open(RESPONSE), Segment(_content(message))]


def _calls(place: str, calls: Any) -> list[Mapping[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", param=place)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            at = f"{place}[{i}].function.name"
            raise RequestError(f"{at} must be a string", param=at)
    return calls


def _call(place: str, index: int, call: Mapping[str, Any]) -> list[Segment]:
    arguments = _arguments(f"{place}.function.arguments", call["function"].get("arguments"))
    inner: list[Segment] = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        inner += _within("argument", [Segment(text)], key=key, type=type_of(value))
    return _within("call", inner, tool=call["function"]["name"], index=str(index))


def _arguments(place: str, given: Any) -> Mapping[str, Any]:
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except ValueError:
            raise RequestError(f"{place} is not valid JSON", param=place) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{place} must be a JSON object", param=place)
    return value


def type_of(value: Any) -> str:
    """The JSON type's name, as an argument's tag gives it."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _results(
    results: Sequence[tuple[int, Message]], calls: Sequence[Mapping[str, Any]]
) -> list[Segment]:
    """Tool results in the order of the calls that they answer, each with its call's name."""
    known = {str(call.get("id")): (i, call["function"]["name"]) for i, call in enumerate(calls)}
    found = [known.get(str(message.get("tool_call_id"))) for _, message in results]
    pairs = [(match, *result) for match, result in zip(found, results, strict=True)]
    if all(match is not None for match in found):
        pairs.sort(key=lambda pair: pair[0] or (0, ""))
    segments: list[Segment] = []
    for position, (match, index, message) in enumerate(pairs):
        if match is None and position >= len(calls):
            place = f"messages[{index}].tool_call_id"
            raise RequestError(f"{place} answers no call of the message before", param=place)
        name = match[1] if match else calls[position]["function"]["name"]
        inner = [Segment(_content(message))]
        segments += _message(inner, role="tool", tool=name, index=str(position + 1))
    return segments
