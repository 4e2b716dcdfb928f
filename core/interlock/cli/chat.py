"""`interlock chat [PROMPT]`: one answer, or a conversation with history."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from interlock.cli.options import add_settings
from interlock.cli.runtime import Runtime, add_sampling, model_files, runtime, sampling_of
from interlock.engine.request import SamplingParams
from interlock.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from interlock.chat import ChatTemplate
    from interlock.settings import Settings
    from interlock.weights.resolve import ModelFiles

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


def load_template(settings: Settings, files: ModelFiles) -> ChatTemplate:
    """The model's chat template; raises ConfigError when it has none."""
    from interlock.chat import ChatTemplate

    template = ChatTemplate.load(files, settings.engine.chat_template)
    if template is None:
        raise ConfigError(
            f"{files.name} has no chat template: use `interlock generate`, or give one with "
            "--chat-template FILE"
        )
    return template


class Conversation:
    """The messages so far, and a model that answers the next one."""

    def __init__(
        self, model: Runtime, template: ChatTemplate, params: SamplingParams, system: str | None
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
        ids = self._prompt_ids([*self.messages, question])
        try:
            for output in self._model.stream(ids, self._params):
                print(output.text, end="", flush=True)
                answer += output.text
        except KeyboardInterrupt:
            self._remember(question, answer)
            raise
        finally:
            print(flush=True)
        self._remember(question, answer)
        return answer

    def _remember(self, question: dict[str, Any], answer: str) -> None:
        self.messages += [question, {"role": "assistant", "content": answer}]

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        text = self._template.render(head + messages, add_generation_prompt=True)
        return self._model.tokenizer.encode(text, add_special_tokens=False)


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
