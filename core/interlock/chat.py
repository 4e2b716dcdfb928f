"""Chat templates: Jinja in a sandbox with bounds on time and size. Imports no torch.

A template comes with the model and is therefore not trusted. Jinja's sandbox keeps it from Python
internals; on top of that every loop turn and macro call checks a deadline, operations that can
blow a value up are bounded before they run, and the output has a size limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from interlock.errors import ConfigError, RequestError
from interlock.sandbox import Limits, SandboxedEnvironment, TemplateLimitError

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles

MAX_OUTPUT_CHARACTERS: Final = 8 << 20
MAX_SECONDS: Final = 2.0
_PROBE_SECONDS: Final = 0.25
_PROBE: Final = "interlock-probe"

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template.

    ``variables`` are always visible to it (``bos_token`` and so on). Rendering is thread-safe.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any] | None = None, *, origin: str = "template"
    ) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._environment = SandboxedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ConfigError(
                f"the chat template in {origin} is malformed{where}: {error}; "
                f"give another one with --chat-template FILE"
            ) from error
        self.takes_strings = self._takes_strings()

    @classmethod
    def load(cls, files: ModelFiles, override: str | None = None) -> ChatTemplate | None:
        """The template of a model, or ``override`` (a file, or the template itself), or None.

        Raises `ConfigError` for a template that doesn't compile or an override that isn't there.
        """
        from interlock.weights.chat_template import find_template, template_variables

        if override is not None:
            source, origin = _read_override(override), override[:80]
        else:
            found = find_template(files)
            if found is None:
                return None
            source, origin = found, str(files.path)
        return cls(source, template_variables(files), origin=origin)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, to be encoded without special tokens.

        ``kwargs`` are further variables for the template (``enable_thinking``, for example).
        Raises `RequestError` with the template's own message if it refuses the conversation.
        """
        prepared = [prepare(message, self.takes_strings) for message in messages]
        variables = {
            **self._variables,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run(variables, MAX_SECONDS)
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except RecursionError as error:
            raise _refused("it recurses too deeply") from error
        except Exception as error:  # whatever a template does with values of unexpected types
            raise _refused(f"{type(error).__name__}: {error}") from error

    def _run(self, variables: Mapping[str, Any], seconds: float) -> str:
        parts: list[str] = []
        size = 0
        with self._environment.limited(Limits(seconds)):
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise TemplateLimitError(
                        f"its output exceeds {MAX_OUTPUT_CHARACTERS} characters"
                    )
        return "".join(parts)

    def _takes_strings(self) -> bool:
        """Whether a message content may be a plain string (else it must be a list of parts)."""

        def shows(content: Any) -> bool:
            variables = {**self._variables, "messages": [{"role": "user", "content": content}]}
            try:
                return _PROBE in self._run(variables, _PROBE_SECONDS)
            except Exception:
                return False

        return shows(_PROBE) or not shows([{"type": "text", "text": _PROBE}])


def _refused(reason: str) -> RequestError:
    return RequestError(
        f"the model's chat template refused the messages: {reason}", param="messages"
    )


def _read_override(override: str) -> str:
    if "{{" in override or "{%" in override:
        return override
    try:
        return Path(override).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {override!r} cannot be read ({error})") from error


def prepare(message: Message, takes_strings: bool) -> dict[str, Any]:
    """A message in the form that templates expect.

    Text parts are joined by newlines if the template wants strings, and the reverse; the arguments
    of tool calls become objects; an absent content is empty unless tools were called.
    """
    prepared = dict(message)
    content = prepared.get("content")
    if content is None and not prepared.get("tool_calls"):
        content = ""
    if takes_strings and isinstance(content, list):
        content = "\n".join(_text(part) for part in content)
    elif not takes_strings and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    prepared["content"] = content
    if isinstance(prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_with_object_arguments(call) for call in prepared["tool_calls"]]
    return prepared


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"content parts of type {kind!r} are not supported; this model takes text only",
        param="messages",
    )


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
