"""How a model is talked to: from messages to token ids, and from its tokens to an answer.

Most models have a Jinja template and answer in plain text. Kimi K3's format has neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from interlock import xtml
from interlock.errors import RequestError
from interlock.weights.config_kimi import KIMI
from interlock.xtml_parser import XTMLParser

if TYPE_CHECKING:
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import ModelFiles

DEFAULTS_KEY: Final = "default_chat_template_kwargs"


class XTMLFormat:
    """Kimi K3's format over one tokenizer. ``defaults`` are the model's own kwargs."""

    source = "xtml"

    def __init__(self, tokenizer: Tokenizer, defaults: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._defaults = dict(defaults or {})
        ids = {name: tokenizer.token_id(name) for name in xtml.BRACKETS}
        missing = [name for name, index in ids.items() if index is None]
        if missing:
            raise RequestError(f"the tokenizer has no token {missing[0]}, so it cannot chat")
        self._ids = {name: index for name, index in ids.items() if index is not None}
        self.brackets = {index: name for name, index in self._ids.items()}

    def options(
        self,
        kwargs: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        effort: str | None = None,
        opens: bool = True,
        continues: bool = False,
    ) -> xtml.ChatOptions:
        """Raises RequestError naming the field that cannot be honoured."""
        chosen = xtml.options_of(kwargs, self._defaults, effort)
        return xtml.ChatOptions(
            tools=tools or (),
            tool_choice=tool_choice or "auto",
            opens=opens,
            continues=continues,
            **chosen,
        )

    def encode(
        self, messages: Sequence[Mapping[str, Any]], options: xtml.ChatOptions
    ) -> tuple[list[int], str]:
        """Token ids of a conversation, and its text for people to read."""
        ids: list[int] = []
        segments = xtml.render(messages, options)
        for text, control in segments:
            if control:
                ids.append(self._ids[text])
            else:
                ids += self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        return ids, "".join(segment.text for segment in segments)

    def parser(
        self, channel: str, *, stops: Sequence[str] = (), include_stop: bool = False
    ) -> XTMLParser:
        """A parser for one answer that begins in ``channel``."""
        special = self._tokenizer.special_ids

        def bytes_of(token: int) -> bytes:
            return b"" if token in special else self._tokenizer.token_bytes(token)

        return XTMLParser(bytes_of, self.brackets, channel, stops=stops, include_stop=include_stop)


def native_format(files: ModelFiles, tokenizer: Tokenizer | None = None) -> XTMLFormat | None:
    """The format of a model that has no template because it needs none, or None."""
    if files.kind == "gguf":
        return None
    from interlock.weights.config_hf import stated_architecture
    from interlock.weights.fields import read_object

    if stated_architecture(files.path) != KIMI[0]:
        return None
    path = files.path / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    if tokenizer is None:
        from interlock.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(files)
    return XTMLFormat(tokenizer, settings.get(DEFAULTS_KEY) or {})
