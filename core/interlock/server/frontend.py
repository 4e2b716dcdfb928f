"""Text to tokens and back in the HTTP process, in threads so that no request blocks another."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from interlock.engine.outputs import EngineInfo
from interlock.errors import QueueFullError, RequestError
from interlock.settings import Settings

if TYPE_CHECKING:
    from interlock.chat_format import XTMLFormat

ENCODE_THREADS = 2
SLACK_CHARACTERS = 4096

_RESERVED = ("self", "messages", "tools", "add_generation_prompt")

T = TypeVar("T")


class TokenizerLike(Protocol):
    """What the server needs of `interlock.tokenizer.Tokenizer`."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_bytes(self, id: int) -> bytes: ...


class TemplateLike(Protocol):
    """What the server needs of `interlock.chat.ChatTemplate`."""

    source: str

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str: ...


@attrs.frozen
class Prompt:
    """Token ids, and the text that ``echo`` gives back.

    ``parser`` makes what reads an answer in the model's own format; None: an answer is text.
    """

    ids: list[int]
    text: str
    parser: Callable[..., Any] | None = None


class Frontend:
    """Tokenizer and chat template of the served model."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        template: TemplateLike | None,
        name: str,
        native: XTMLFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.native = native
        self.template = template
        self.model_name = name
        self.vocab_size = tokenizer.vocab_size
        self.max_model_len = 0
        self.fingerprint = ""
        self._pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode")
        self._places = threading.Semaphore(0)

    def open(self, info: EngineInfo, places: int) -> None:
        """Take over what the engine says of itself; at most ``places`` prompts wait in `run`."""
        self.max_model_len = info.max_model_len
        self.vocab_size = info.vocab_size
        self.fingerprint = info.fingerprint
        self._places = threading.Semaphore(places)

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a bound on what one position of the context can hold."""
        ids = range(self.tokenizer.vocab_size)
        return max((len(self.tokenizer.token_bytes(i)) for i in ids), default=1) or 1

    async def run(self, work: Callable[[], T]) -> T:
        """``work`` in one of the threads. Raises QueueFullError beyond the queue's bound."""
        places = self._places
        if not places.acquire(blocking=False):
            raise QueueFullError("too many prompts wait for tokenization")
        future = self._pool.submit(work)
        # Not in a finally: a request that is cancelled leaves its thread running.
        future.add_done_callback(lambda _: places.release())
        return await asyncio.wrap_future(future)

    def encode(self, text: str, *, add_special_tokens: bool, truncate: int | None = None) -> Prompt:
        """Tokens of ``text``; hopelessly long text is refused before it costs any work."""
        self._refuse_hopeless(len(text), truncate)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(ids, text)

    def _refuse_hopeless(self, characters: int, truncate: int | None) -> None:
        limit = self.max_model_len * self.longest_token + SLACK_CHARACTERS
        if truncate is None and characters > limit:
            raise RequestError(
                f"the prompt has {characters} characters; the context of {self.max_model_len} "
                f"tokens holds at most {limit}",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_ids(self, ids: Sequence[int], param: str = "prompt") -> None:
        """Raise RequestError if an id is not a row of the embedding table."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"{param}: token id {bad} is out of vocabulary (0 to {self.vocab_size - 1})",
                param=param,
            )

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any] | None,
        tool_choice: str | None = None,
        effort: str | None = None,
        add_special_tokens: bool = False,
        truncate: int | None = None,
    ) -> Prompt:
        """The tokens of a conversation. Raises RequestError naming what cannot be honoured."""
        if self.native is None:
            _refuse_native(tool_choice, effort)
            text = self.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tool_choice == "none" else tools,
                kwargs=kwargs,
            )
            # The template writes the special tokens itself: adding them again would double BOS.
            return self.encode(text, add_special_tokens=add_special_tokens, truncate=truncate)
        _check_continued(messages, add_generation_prompt, continue_final_message)
        options = self.native.options(
            kwargs or {},
            tools=tools,
            tool_choice=tool_choice,
            effort=effort,
            opens=add_generation_prompt is not False and not continue_final_message,
            continues=continue_final_message,
        )
        self._refuse_hopeless(sum(len(str(m.get("content") or "")) for m in messages), truncate)
        ids, text = self.native.encode(messages, options)
        return Prompt(ids, text, functools.partial(self.native.parser, options.channel))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any] | None,
    ) -> str:
        """The conversation as text. Raises RequestError if the template cannot render it."""
        template = self._template(tools, kwargs)
        _check_exclusive(add_generation_prompt, continue_final_message)
        generation = not continue_final_message and add_generation_prompt is not False
        text = template.render(
            messages, add_generation_prompt=generation, tools=tools, **(kwargs or {})
        )
        return _cut_after_final(text, messages) if continue_final_message else text

    def _template(
        self, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any] | None
    ) -> TemplateLike:
        if self.template is None:
            raise RequestError(
                "this model has no chat template; start the server with "
                "--set engine.chat_template=FILE, or use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if tools and "tools" not in self.template.source:
            raise RequestError("tools: the model's chat template does not know them", param="tools")
        for name in kwargs or {}:
            if name in _RESERVED or not name.isidentifier():
                raise RequestError(
                    f"chat_template_kwargs: {name[:80]!r} cannot be set",
                    param="chat_template_kwargs",
                )
        return self.template

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - one front end lives as long as the process
    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text and bytes; special tokens show their name."""
        raw = self.tokenizer.token_bytes(token_id)
        if not raw:
            raw = (self.tokenizer.id_to_token(token_id) or "").encode()
        return raw.decode("utf-8", "replace"), raw

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _refuse_native(tool_choice: str | None, effort: str | None) -> None:
    """What a Jinja template has no word for."""
    if tool_choice == "required":
        raise RequestError(
            "tool_choice: this model's chat format knows only 'none' and 'auto'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if effort is not None:
        raise RequestError(
            "reasoning_effort: this model's chat format does not know it; see "
            "chat_template_kwargs for what its template takes",
            param="reasoning_effort",
            code="unsupported_parameter",
        )


def _check_exclusive(generation: bool | None, continues: bool) -> None:
    if continues and generation:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )


def _check_continued(
    messages: list[dict[str, Any]], generation: bool | None, continues: bool
) -> None:
    _check_exclusive(generation, continues)
    last = messages[-1]
    if continues and (last["role"] != "assistant" or not (last.get("content") or "").strip()):
        raise RequestError(
            "continue_final_message needs a last assistant message with text",
            param="continue_final_message",
        )


def _cut_after_final(text: str, messages: list[dict[str, Any]]) -> str:
    final = messages[-1].get("content") or ""
    if messages[-1].get("role") != "assistant" or not final.strip():
        raise RequestError(
            "continue_final_message needs a last assistant message with text",
            param="continue_final_message",
        )
    # Templates may strip a message; what is continued then ends where the stripped text ends.
    for candidate in (final, final.rstrip(), final.strip()):
        place = text.rfind(candidate)
        if place >= 0:
            return text[: place + len(candidate)]
    raise RequestError(
        "the chat template does not keep the last message", param="continue_final_message"
    )


def load_frontend(settings: Settings) -> Frontend:
    """Find the model's files (fetching them on first use) and read tokenizer and template."""
    from interlock.chat import ChatTemplate
    from interlock.chat_format import native_format
    from interlock.cli.console import download_progress, progress_bars
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import resolve

    with progress_bars() as bars:
        name = settings.engine.model
        files = resolve(name, progress=download_progress(bars, name))
    template = ChatTemplate.load(files, settings.engine.chat_template)
    tokenizer = Tokenizer.load(files)
    native = None if template is not None else native_format(files, tokenizer)
    name = settings.engine.served_model_name or files.name
    return Frontend(tokenizer, template, name, native)
