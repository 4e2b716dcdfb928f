"""`interlock generate PROMPT`: complete a prompt as it stands, without a chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from interlock.cli.console import print_json
from interlock.cli.options import add_settings
from interlock.cli.runtime import Runtime, add_sampling, model_files, runtime, sampling_of
from interlock.engine.outputs import Output
from interlock.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads stdin")
    parser.add_argument("-n", type=int, default=1, help="number of completions (default: 1)")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="the bare text, no newline added")
    form.add_argument("--json", action="store_true", help="one JSON object at the end")
    add_sampling(parser, max_tokens=128, temperature=0.8)
    add_settings(parser, "engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.n < 1:
        raise ConfigError(f"-n must be at least 1, not {args.n}")
    params = sampling_of(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with runtime(*model_files(args)) as model:
        outputs = model.stream(model.tokenizer.encode(prompt), params, args.n)
        if args.json:
            print_json(_record(model, prompt, _collect(outputs, args.n)))
        elif args.n == 1:
            _print_live(outputs, prompt if args.echo else "", newline=not args.raw)
        else:
            _print_choices(_collect(outputs, args.n), prompt if args.echo else "")
    return 0


def _print_live(outputs: Iterable[Output], head: str, *, newline: bool) -> None:
    print(head, end="", flush=True)
    begun = bool(head)
    try:
        for output in outputs:
            print(output.text, end="", flush=True)
            begun = True
    finally:
        if newline and begun:
            print(flush=True)


class Choice:
    """One completion, put together from its outputs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.last: Output | None = None

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.last = output

    def record(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.last.finish_reason if self.last else None,
            "stop_reason": self.last.stop_reason if self.last else None,
        }


def _collect(outputs: Iterable[Output], n: int) -> list[Choice]:
    choices = [Choice(i) for i in range(n)]
    for output in outputs:
        choices[int(output.request_id)].add(output)
    return choices


def _print_choices(choices: list[Choice], head: str) -> None:
    for choice in choices:
        print(f"--- {choice.index + 1} of {len(choices)} ---")
        print(head + choice.text)


def _record(model: Runtime, prompt: str, choices: list[Choice]) -> dict[str, Any]:
    last = choices[0].last
    return {
        "model": model.engine.info.model_name,
        "prompt": prompt,
        "choices": [choice.record() for choice in choices],
        "usage": {
            "prompt_tokens": last.num_prompt_tokens if last else 0,
            "completion_tokens": sum(len(choice.token_ids) for choice in choices),
        },
        "timings": _timings(last),
    }


def _timings(last: Output | None) -> dict[str, float] | None:
    if last is None or last.timings is None:
        return None
    return {f"{name}_s": value for name, value in msgspec.structs.asdict(last.timings).items()}
