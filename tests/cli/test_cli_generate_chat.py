from __future__ import annotations

import io
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from interlock.chat import ChatTemplate
from interlock.cli import chat, generate, main
from interlock.cli.runtime import Runtime
from interlock.engine.outputs import Output, Timings
from interlock.engine.request import SamplingParams
from interlock.errors import RequestError
from interlock.settings import Settings

TEMPLATE = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"


# -- generate ----------------------------------------------------------------------------------


def test_generate_prints_the_completion_and_a_newline(engine: Any, capsys: Any) -> None:
    assert main(["generate", "abc"]) == 0
    assert capsys.readouterr().out == "ABC\n"
    assert engine.prompts == ["abc"]


def test_generate_echo_raw_and_stdin(engine: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert main(["generate", "-", "--echo", "--raw"]) == 0
    assert capsys.readouterr().out == "from stdinFROM STDIN"


def test_generate_json_is_one_object(engine: Any, capsys: Any) -> None:
    assert main(["generate", "ab", "--json", "-n", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [c["text"] for c in answer["choices"]] == ["AB", "AB"]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "stop"]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
    assert [r.stream for r in engine.requests] == [0, 1]


def test_generate_several_are_numbered(engine: Any, capsys: Any) -> None:
    assert main(["generate", "ab", "-n", "2"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2 ---\nAB\n--- 2 of 2 ---\nAB\n"


def test_generate_passes_the_sampling_options(engine: Any) -> None:
    words = ["--temperature", "0", "--top-k", "5", "--stop", "x", "--stop", "y", "--seed", "7"]
    assert main(["generate", "ab", "--max-tokens", "3", *words]) == 0
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 5, 3)
    assert (params.stop, params.seed) == (("x", "y"), 7)


def test_generate_streams_before_the_end(engine: Any, capsys: Any) -> None:
    shown: list[str] = []
    engine.on_step = lambda: shown.append(capsys.readouterr().out)
    main(["generate", "abc"])
    assert shown == ["", "A", "B"]


def test_a_failed_sequence_is_status_1(engine: Any, capsys: Any) -> None:
    engine.error = "logits are NaN"
    assert main(["generate", "abc"]) == 1
    assert capsys.readouterr() == ("", "interlock: error: logits are NaN\n")


def test_json_names_the_timings() -> None:
    output = Output("0", [1], "a", timings=Timings(queue=0.5, prefill=1.0, decode=2.0))
    assert generate._timings(output) == {"queue_s": 0.5, "prefill_s": 1.0, "decode_s": 2.0}
    assert generate._timings(None) is None


# -- leaving early -----------------------------------------------------------------------------


@pytest.fixture
def model(engine: Any) -> Runtime:
    return Runtime(Settings(), SimpleNamespace(name="fake"), engine)  # type: ignore[arg-type]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_leaving_the_stream_aborts_what_runs(engine: Any, model: Runtime) -> None:
    stream = model.stream([97, 98, 99], SamplingParams(), n=2)
    next(stream)
    stream.close()
    assert len(engine.aborted) == 2
    assert not engine.running


def test_ctrl_c_takes_effect_after_the_step(engine: Any, model: Runtime) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.on_step = press_ctrl_c
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        for output in model.stream([97, 98, 99], SamplingParams()):
            engine.on_step = lambda: None
            seen.append(output.text)
    assert seen == ["A"]
    assert not engine.running
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_immediate(engine: Any, model: Runtime) -> None:
    def twice() -> None:
        engine.on_step = lambda: None
        press_ctrl_c()
        press_ctrl_c()

    engine.on_step = twice
    with pytest.raises(KeyboardInterrupt):
        next(model.stream([97, 98, 99], SamplingParams()))


# -- chat --------------------------------------------------------------------------------------


@pytest.fixture
def template(monkeypatch: Any) -> None:
    monkeypatch.setattr("interlock.chat.ChatTemplate.load", lambda *_: ChatTemplate(TEMPLATE))


@pytest.fixture
def conversation(model: Runtime) -> chat.Conversation:
    return chat.Conversation(model, ChatTemplate(TEMPLATE), SamplingParams(), None)


def test_chat_once(engine: Any, template: None, capsys: Any) -> None:
    assert main(["chat", "hi", "--system", "be kind"]) == 0
    assert engine.prompts == ["<system:be kind><user:hi>"]
    assert capsys.readouterr().out == "<SYSTEM:BE KIND><USER:HI>\n"


def test_chat_without_a_template_says_what_to_do(
    engine: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("interlock.chat.ChatTemplate.load", lambda *_: None)
    assert main(["chat", "hi"]) == 2
    assert "fake-model has no chat template: use `interlock generate`" in capsys.readouterr().err


def test_an_empty_prompt_is_refused(engine: Any, capsys: Any) -> None:
    assert main(["chat", " "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_history_is_part_of_the_next_prompt(engine: Any, conversation: Any) -> None:
    engine.reply = lambda _: "yes"
    conversation.ask("one")
    conversation.ask("two")
    assert engine.prompts[1] == "<user:one><assistant:yes><user:two>"


def test_ctrl_c_keeps_the_part_that_was_said(engine: Any, conversation: Any) -> None:
    engine.reply = lambda _: "long answer"
    steps = iter([lambda: None, lambda: None, press_ctrl_c])
    engine.on_step = lambda: next(steps, lambda: None)()
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("one")
    assert conversation.messages[-1] == {"role": "assistant", "content": "lon"}


def test_a_failed_answer_leaves_the_history_alone(engine: Any, conversation: Any) -> None:
    conversation.ask("one")
    before = list(conversation.messages)
    engine.error = "too long"
    with pytest.raises(RequestError):
        conversation.ask("two")
    assert conversation.messages == before


def talk(monkeypatch: Any, conversation: Any, *lines: str | type[BaseException]) -> None:
    script = iter(lines)

    def read(_: str) -> str:
        item = next(script)
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr("builtins.input", read)
    chat.interact(conversation)


def test_commands_of_the_conversation(
    engine: Any, conversation: Any, monkeypatch: Any, capsys: Any
) -> None:
    engine.reply = lambda _: "yes"
    talk(monkeypatch, conversation, "a", "/reset", "b", "/system calm", "c", "/nonsense", "/exit")
    assert engine.prompts == ["<user:a>", "<user:b>", "<system:calm><user:c>"]
    assert "unknown command /nonsense" in capsys.readouterr().out


def test_help_system_and_empty_lines(conversation: Any, monkeypatch: Any, capsys: Any) -> None:
    talk(monkeypatch, conversation, "/help", "", "/system", EOFError)
    out = capsys.readouterr().out
    assert "/reset" in out
    assert "(no system message)" in out


def test_ctrl_c_at_the_prompt_leaves(conversation: Any, monkeypatch: Any) -> None:
    talk(monkeypatch, conversation, KeyboardInterrupt)


def test_ctrl_c_in_an_answer_and_errors_stay_in_the_conversation(
    engine: Any, conversation: Any, monkeypatch: Any, capsys: Any
) -> None:
    def stop_then_fail() -> None:
        engine.on_step = lambda: setattr(engine, "error", "too long")
        press_ctrl_c()

    engine.on_step = stop_then_fail
    talk(monkeypatch, conversation, "abc", "def", "/exit")
    out = capsys.readouterr().out
    assert "(stopped)" in out
    assert "error: too long; /reset" in out
