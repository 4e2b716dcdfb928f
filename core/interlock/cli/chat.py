"""`interlock chat [PROMPT]`: one answer, or a conversation with history."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock.chat_format import XTMLFormat
from interlock.cli.options import add_settings
from interlock.cli.runtime import Runtime, add_sampling, model_files, runtime, sampling_of
from interlock.engine.request import SamplingParams
from interlock.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from interlock.chat import ChatTemplate
    from interlock.engine.outputs import Output
    from interlock.settings import Settings
    from interlock.weights.resolve import ModelFiles
    from interlock.xtml_parser import XTMLParser

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message (without TEXT: show it) and start anew
/help           this list
/exit           leave (so do Ctrl-D and, at the prompt, Ctrl-C)
Ctrl-C during an answer stops the answer; what was said so far stays in the history."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="ask this once and leave; - reads stdin"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, max_tokens=1024, temperature=0.7)
    add_settings(parser, "engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise ConfigError("chat: the prompt is empty; give a PROMPT or use a terminal")
    params = sampling_of(args)
    settings, files = model_files(args)
    template = load_template(settings, files)
    with runtime(settings, files) as model:
        conversation = Conversation(model, template, params, args.system)
        if prompt is None:
            interact(conversation)
        else:
            conversation.ask(prompt)
    return 0


def load_template(settings: Settings, files: ModelFiles) -> ChatTemplate | XTMLFormat:
    """How the model is talked to; raises ConfigError when nothing says so."""
    from interlock.chat import ChatTemplate
    from interlock.chat_format import native_format

    template = ChatTemplate.load(files, settings.engine.chat_template)
    native = None if template else native_format(files)
    if native is not None:
        return native
    if template is None:
        raise ConfigError(
            f"{files.name} has no chat template: use `interlock generate`, or give one with "
            "--chat-template FILE"
        )
    return template


class Conversation:
    """The messages so far, and a model that answers the next one."""

    def __init__(
        self,
        model: Runtime,
        template: ChatTemplate | XTMLFormat,
        params: SamplingParams,
        system: str | None,
    ) -> None:
        self._model = model
        self._template = template
        self._params = params
        self.system = system
        self.messages: list[dict[str, Any]] = []

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, text: str) -> str:
        """Print the answer as it comes and remember it, also one cut short by Ctrl-C.

        An answer that fails (RequestError) leaves the history as it was.
        """
        question = {"role": "user", "content": text}
        answer = ""
        ids, read = self._prompt([*self.messages, question])
        try:
            for output in self._model.stream(ids, self._params):
                answer += read(output)
        except KeyboardInterrupt:
            self._remember(question, answer)
            raise
        finally:
            print(flush=True)
        self._remember(question, answer)
        return answer

    def _remember(self, question: dict[str, Any], answer: str) -> None:
        self.messages += [question, {"role": "assistant", "content": answer}]

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], Callable[[Output], str]]:
        """Token ids, and what shows an output and gives back its part of the answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        if isinstance(self._template, XTMLFormat):
            options = self._template.options({})
            ids, _ = self._template.encode(head + messages, options)
            params = self._params
            parser = self._template.parser(
                options.channel,
                stops=params.stop,
                include_stop=params.include_stop_str_in_output,
            )
            return ids, functools.partial(show_parsed, parser)
        text = self._template.render(head + messages, add_generation_prompt=True)
        return self._model.tokenizer.encode(text, add_special_tokens=False), show_text


def show_text(output: Output) -> str:
    print(output.text, end="", flush=True)
    return output.text


def show_parsed(parser: XTMLParser, output: Output) -> str:
    """Print reasoning dimly and tool calls as they are called; gives back the content alone."""
    delta = parser.push(output.token_ids, final=output.finish_reason is not None)
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    if thought := delta.get("reasoning_content"):
        print(f"{dim}{thought}{plain}", end="", flush=True)
    content: str = delta.get("content", "")
    if content and parser.reasoning and content == parser.content:
        print()
    print(content, end="", flush=True)
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        print(f"\n{function['name']} " if "name" in function else "", end="")
        print(function["arguments"], end="", flush=True)
    return content


def interact(conversation: Conversation) -> None:
    """Read lines until /exit, Ctrl-D, or Ctrl-C at the prompt."""
    _enable_line_editing()
    print("Type a message; /help lists the commands.")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    if line.startswith("/"):
        print(command(conversation, line))
    elif line:
        try:
            conversation.ask(line)
        except KeyboardInterrupt:
            print("(stopped)")
        except RequestError as error:
            print(f"error: {error}; /reset starts a new conversation")


def command(conversation: Conversation, line: str) -> str:
    """Carry out a line that begins with a slash and return what to tell the user."""
    name, _, rest = line.partition(" ")
    if name == "/help":
        return HELP
    if name == "/reset":
        conversation.reset()
        return "(new conversation)"
    if name == "/system":
        return _system(conversation, rest.strip())
    return f"unknown command {name}; /help lists the commands"


def _system(conversation: Conversation, text: str) -> str:
    if not text:
        return conversation.system or "(no system message)"
    conversation.system = text
    conversation.reset()
    return "(system message set, new conversation)"


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (importing it gives input() history and editing)
    except ImportError:
        return
