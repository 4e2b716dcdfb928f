"""An engine inside this process, driven for one caller: what `generate` and `chat` use."""

from __future__ import annotations

import argparse
import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from interlock.cli.console import download_progress, progress_bars
from interlock.cli.options import settings_of
from interlock.engine.request import Request, SamplingParams
from interlock.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from interlock.engine.engine import Engine
    from interlock.engine.outputs import Output
    from interlock.settings import Settings
    from interlock.tokenizer import Tokenizer
    from interlock.weights.resolve import ModelFiles


class Runtime:
    """A loaded model: its files, tokenizer and engine."""

    def __init__(self, settings: Settings, files: ModelFiles, engine: Engine) -> None:
        self.settings = settings
        self.files = files
        self.engine = engine
        self.tokenizer = _tokenizer(engine, files)
        self._ids = itertools.count()

    def stream(self, ids: Sequence[int], params: SamplingParams, n: int = 1) -> Iterator[Output]:
        """Outputs of ``n`` samples of one prompt as they come; ``request_id`` is the sample index.

        Leaving the iterator early (Ctrl-C too) aborts what still runs. Raises RequestError for
        parameters that the engine refuses and for a sequence that fails.
        """
        serial = next(self._ids)
        names = {f"cli-{serial}-{i}": str(i) for i in range(n)}
        try:
            for stream, name in enumerate(names):
                self.engine.add(Request(name, list(ids), params, stream=stream))
            with _Interruptible() as interrupt:
                while names and self.engine.has_work():
                    for output in self.engine.step():
                        if output.request_id in names:
                            yield self._checked(output, names)
                    interrupt.check()
        finally:
            self._abort(names)

    def _checked(self, output: Output, names: dict[str, str]) -> Output:
        if output.finish_reason is not None:
            output = _renamed(output, names.pop(output.request_id))
        else:
            output = _renamed(output, names[output.request_id])
        if output.finish_reason == "error":
            raise RequestError(output.error or "the sequence failed in the engine")
        return output

    def _abort(self, names: dict[str, str]) -> None:
        running = [name for name in names if self.engine.abort(name)]
        while running and self.engine.has_work():
            ended = {o.request_id for o in self.engine.step() if o.finish_reason is not None}
            running = [name for name in running if name not in ended]


def _tokenizer(engine: Engine, files: ModelFiles) -> Tokenizer:
    from interlock.tokenizer import Tokenizer

    return engine.tokenizer or Tokenizer.load(files)


class _Interruptible:
    """Ctrl-C takes effect between two steps, so that the engine stays whole; twice: at once."""

    def __init__(self) -> None:
        self._pressed = False
        self._previous: Any = None

    def __enter__(self) -> _Interruptible:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in a background job
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _press(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    def check(self) -> None:
        if self._pressed:
            raise KeyboardInterrupt


def _renamed(output: Output, name: str) -> Output:
    import msgspec

    return msgspec.structs.replace(output, request_id=name)


def model_files(args: argparse.Namespace) -> tuple[Settings, ModelFiles]:
    """Settings and model files of a command; downloads the model if it has to. No torch yet."""
    settings = settings_of(args)
    from interlock.weights.resolve import resolve

    with progress_bars() as bars:
        name = settings.engine.model
        return settings, resolve(name, progress=download_progress(bars, name))


@contextmanager
def runtime(settings: Settings, files: ModelFiles) -> Iterator[Runtime]:
    """A loaded engine for the length of the block."""
    with progress_bars() as bars:
        if bars is not None:
            bars.load("importing torch", 0.0)
        from interlock.engine.engine import Engine

        engine = Engine(settings, progress=bars.load if bars else None)
    try:
        yield Runtime(settings, files, engine)
    finally:
        engine.close()


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    group.add_argument("--temperature", type=float, default=temperature, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0, help="0: no limit")
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--seed", type=int, help="same seed, same text")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="run on to --max-tokens")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of a command; raises ConfigError before any model is loaded."""
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    try:
        params.validate(vocab_size=2**31)
    except RequestError as error:
        raise ConfigError("--" + str(error).replace("_", "-")) from None
    return params
