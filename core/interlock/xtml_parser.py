"""What a model answers in Kimi K3's chat format, token by token: reasoning, text and tool calls.

The parser sees token ids, not text: content may spell ``<|close|>``, and is then still content. Its
deltas, put together, are the same for every partition of the tokens into pushes. Output that is
malformed or cut off becomes content as far as it can be shown; nothing raises.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from interlock.engine.outputs import TextStream
from interlock.xtml import CLOSE, OPEN, RESPONSE, SEP, THINK, unescape

Delta = dict[str, Any]
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


class XTMLParser:
    """Parses one answer.

    ``brackets`` maps the ids of the four control tokens to their names; ``channel`` is where the
    prompt has left off: ``think``, ``response`` or nothing.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        brackets: Mapping[int, str],
        channel: str,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._bytes_of, self._brackets, self._new_id = bytes_of, brackets, new_id
        self._stops = (tuple(stops), include_stop)
        self.reasoning = ""
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._channel = channel
        self._header: tuple[str, bytearray] | None = None
        self._text = self._new_text()
        self._value: list[str] | None = None
        self._type = ""
        self._first, self._whole = True, False
        self._done = False
        self._delta: Delta = {}

    def push(self, token_ids: Iterable[int], *, final: bool = False) -> Delta:
        """The delta that these tokens make, in the form of OpenAI's chunks; maybe empty."""
        self._delta = {}
        for token in token_ids:
            self._take(token)
        if final:
            self._finish()
        return self._delta

    # -- tokens --------------------------------------------------------------------------------

    def _take(self, token: int) -> None:
        bracket = self._brackets.get(token)
        self.reasoning_tokens += self._channel == THINK and bracket is None
        if self._done:
            return
        if bracket is None:
            if self._header is not None:
                self._header[1].extend(self._bytes_of(token))
            else:
                self._say(self._text.push(token))
        elif bracket in (OPEN, CLOSE):
            self._spell_header()
            self._header = (bracket, bytearray())
        elif bracket == SEP:
            self._tag()
        else:
            self._spell_header()
            self._leave()
            self._done = True

    def _tag(self) -> None:
        """A whole tag has come; one that means nothing here is shown as it was spelled."""
        if self._header is None:
            self._say_text(SEP)
            return
        kind, raw = self._header
        self._header = None
        text = raw.decode("utf-8", "replace")
        name, _, rest = text.partition(" ")
        attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(rest)}
        known = self._enter(name, attributes) if kind == OPEN else self._exit(name)
        if not known:
            self._say_text(f"{kind}{text}{SEP}")

    def _spell_header(self) -> None:
        if self._header is not None:
            kind, raw = self._header
            self._header = None
            self._say_text(kind + raw.decode("utf-8", "replace"))

    def _enter(self, name: str, attributes: Mapping[str, str]) -> bool:
        if self._channel in ("", "message", "tools") and name == "message":
            self._channel = "message"
            return True
        if self._channel in ("", "message") and name in (THINK, RESPONSE, "tools"):
            self._move(name)
            return True
        if self._channel == "tools" and name == "call" and attributes.get("tool"):
            self._move("call")
            self._open_call(attributes["tool"])
            return True
        keyed = name == "argument" and "key" in attributes
        if self._channel == "call" and (keyed or name == "json"):
            self._move(name)
            self._open_argument(attributes.get("key"), attributes.get("type", "string"))
            return True
        return False

    def _exit(self, name: str) -> bool:
        if name == "message" and self._channel in ("", "message"):
            return True
        if name != self._channel or not name:
            return False
        self._close_channel()
        self._channel = {"argument": "call", "json": "call", "call": "tools"}.get(name, "")
        self._text = self._new_text()
        return True

    def _move(self, channel: str) -> None:
        self._channel = channel
        self._text = self._new_text()

    def _new_text(self) -> TextStream:
        shown = self._channel in (THINK, RESPONSE)
        stops, include = self._stops if shown else ((), False)
        return TextStream(self._bytes_of, stops, include)

    def _close_channel(self) -> None:
        """The current channel ends."""
        self._say(self._text.finish())
        if self._channel in ("argument", "json"):
            self._close_argument()
        elif self._channel == "call":
            self._close_call()

    def _leave(self) -> None:
        """The current channel ends, with what it is inside of."""
        self._close_channel()
        if self._channel in ("argument", "json"):
            self._close_call()

    def _finish(self) -> None:
        if self._done:
            return
        self._spell_header()
        self._leave()
        self._done = True

    # -- what is said --------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._channel == THINK:
            self.reasoning += text
            self._delta["reasoning_content"] = self._delta.get("reasoning_content", "") + text
        elif self._channel in ("argument", "json"):
            self._argue(text)
        elif self._channel == RESPONSE:
            self._say_text(text)
        else:
            # Between channels a model may break lines; more than that is shown.
            self._say_text("".join(text.split()))

    def _say_text(self, text: str) -> None:
        if text:
            self.content += text
            self._delta["content"] = self._delta.get("content", "") + text

    # -- tool calls ----------------------------------------------------------------------------

    def _open_call(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call = {"id": self._new_id(), "type": "function", "function": function}
        self.calls.append(call)
        opening = {"index": len(self.calls) - 1, **call, "function": dict(function)}
        self._delta.setdefault("tool_calls", []).append(opening)
        self._first, self._whole = True, False

    def _open_argument(self, key: str | None, kind: str) -> None:
        self._type = "json" if key is None else kind
        self._value = []
        if key is not None:
            before = "{" if self._first else ", "
            self._first = False
            self._write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            if kind == "string":
                self._write('"')

    def _argue(self, text: str) -> None:
        if self._type == "string":
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._value is not None:
            self._value.append(text)

    def _close_argument(self) -> None:
        """A value that is no string is shown when it is whole: it may turn out not to be JSON."""
        text = "".join(self._value or [])
        if self._type == "string":
            self._write('"')
        elif self._type == "json":
            self._write(text.strip() or "{}")
            self._whole = True
        else:
            self._write(text.strip() if is_json(text) else json.dumps(text, ensure_ascii=False))
        self._value = None

    def _close_call(self) -> None:
        if not self._whole:
            self._write("{}" if self._first else "}")

    def _write(self, piece: str) -> None:
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += piece
        deltas = self._delta.setdefault("tool_calls", [])
        if not deltas or deltas[-1]["index"] != index:
            deltas.append({"index": index, "function": {"arguments": ""}})
        deltas[-1]["function"]["arguments"] += piece


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
