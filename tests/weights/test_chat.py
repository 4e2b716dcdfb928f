"""Chat templates: rendering, message forms, and the limits on hostile templates."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tinymodels
from interlock import chat
from interlock.chat import ChatTemplate
from interlock.errors import ConfigError, RequestError
from interlock.tokenizer import Tokenizer
from interlock.weights.resolve import local_files

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(chat, "_PROBE_SECONDS", 0.05)


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages, **kwargs)


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_template_of_a_model(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf")
    else:
        path = tinymodels.write_tiny_hf(tmp_path / "m")
    template = ChatTemplate.load(local_files(path))
    assert template is not None
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER) == expected
    assert template.render(USER, add_generation_prompt=False) == expected[:-22]


def test_model_without_template(tmp_path: Path) -> None:
    for path in (
        tinymodels.write_tiny_gguf(tmp_path / "m.gguf", chat_template=None),
        tinymodels.write_tiny_hf(tmp_path / "m", chat_template=None),
    ):
        assert ChatTemplate.load(local_files(path)) is None


def test_places_of_a_template_in_a_folder(tmp_path: Path) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "m", chat_template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert _loaded(folder) == "D"
    (folder / "chat_template.jinja").write_text("J{{ bos_token }}{{ pad_token }}")
    assert _loaded(folder) == "J<|im_start|>"


def _loaded(folder: Path, override: str | None = None) -> str:
    template = ChatTemplate.load(local_files(folder), override)
    assert template is not None
    return template.render(USER)


def test_override(tmp_path: Path) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "m")
    file = tmp_path / "t.jinja"
    file.write_text("from a file: {{ messages[0].content }}")
    assert _loaded(folder, str(file)) == "from a file: hi"
    assert _loaded(folder, "inline {{ eos_token }}") == "inline <|im_end|>"
    with pytest.raises(ConfigError, match=r"'nowhere\.jinja' cannot be read"):
        ChatTemplate.load(local_files(folder), "nowhere.jinja")


def test_malformed_template_says_where() -> None:
    with pytest.raises(ConfigError, match=r"malformed in line 2.*--chat-template FILE"):
        ChatTemplate("{{ messages }}\n{% for %}")


def test_chat_prompt_has_exactly_one_bos(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", add_bos=True, chat_template=source)
    files = local_files(path)
    template, tokenizer = ChatTemplate.load(files), Tokenizer.load(files)
    assert template is not None
    text = template.render(USER)
    for add_special_tokens in (False, True):
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids.count(tinymodels.IM_START) == 1


def test_template_errors_are_bad_requests() -> None:
    with pytest.raises(RequestError, match="refused the messages: bad roles") as caught:
        render("{{ raise_exception('bad roles') }}")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    for source in (
        "{{ messages[0].content + 1 }}",
        "{{ missing.name }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content() }}",
    ):
        with pytest.raises(RequestError):
            render(source)


def test_alternating_roles_template() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source) == "hi"
    with pytest.raises(RequestError, match="roles must alternate"):
        render(source, USER * 2)


def test_empty_assistant_message_is_rendered(tmp_path: Path) -> None:
    template = ChatTemplate(tinymodels.CHAT_TEMPLATE)
    messages = [*USER, {"role": "assistant", "content": ""}, *USER]
    assert "<|im_start|>assistant\n<|im_end|>\n" in template.render(messages)
    messages[1] = {"role": "assistant", "content": None}
    assert "<|im_start|>assistant\n<|im_end|>\n" in template.render(messages)


def test_content_parts_are_joined_for_string_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_string_content_becomes_parts_for_part_templates() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}"
        "{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}{% endfor %}"
    )
    assert not ChatTemplate(source).takes_strings
    assert render(source) == "[hi]"


def test_other_parts_are_refused() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="parts of type 'image_url'"):
        render("{{ messages[0].content }}", [{"role": "user", "content": image}])


def test_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[1].tool_calls[0].function.arguments|tojson }}{{ messages[1].content }}"
    assert render(source, messages) == '{"x": "<é>"}None'
    call["function"]["arguments"] = "not json"  # type: ignore[index]
    assert render(source, messages) == '"not json"None'
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools|length }}", tools=tools) == "1"


def test_features_that_templates_use() -> None:
    source = """
    {%- for m in messages %}
        {%- if m.role == 'skip' %}{% continue %}{% endif %}
        {%- generation %}{{ m.content ~ '!' }}{% endgeneration %}
        {{- loop.last }}
    {%- endfor %}
    {%- macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }}
    {%- set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
    {{- strftime_now('%Y')|length }}{{ 'a,b'.split(',')|join(';') }}{{ x is defined }}
    {{- '{:>4}'.format(1) }}{{ '%03d' % 7 }}
    {{- messages|selectattr('role', 'equalto', 'user')|list|length }}
    {{- enable_thinking }}"""
    assert render(source, enable_thinking=False) == "hi!Trueabab24a;bFalse   100" + "71False"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render("{{ messages[0].content }}", messages)
    assert json.dumps(messages) == before
    with pytest.raises(RequestError):
        render("{{ messages.append(1) }}")


GROW = (
    "{% set ns = namespace(x='aaaaaaaa') %}"
    "{% for i in range(60) %}{% set ns.x = EXPR %}{% endfor %}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BIG = "{% set l = ['a' * 1000000] * 1000000 %}"
HOSTILE = {
    "nested loops": LOOPS,
    "macro recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "loop recursion": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "product": "{{ 'a' * 10**9 }}",
    "list product": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 10**(10**10) }}",
    "power tower": "{{ 9**(9**(9**9)) }}",
    "doubling ~": GROW.replace("EXPR", "ns.x ~ ns.x"),
    "doubling +": GROW.replace("EXPR", "ns.x + ns.x"),
    "doubling join": GROW.replace("EXPR", "[ns.x, ns.x]|join"),
    "doubling replace": GROW.replace("EXPR", "ns.x.replace('a', 'aaaaaaaa')"),
    "doubling format": GROW.replace("EXPR", "'%s%s'|format(ns.x, ns.x)"),
    "doubling percent": GROW.replace("EXPR", "'%s%s' % (ns.x, ns.x)"),
    "doubling str.format": GROW.replace("EXPR", "'{0}{0}'.format(ns.x)"),
    "doubling list": GROW.replace("EXPR", "[ns.x, ns.x]") + "{{ ns.x }}",
    "captured text": "{% set x %}{% for i in range(9999) %}{% for j in range(9999) %}"
    + "z" * 5000
    + "{% endfor %}{% endfor %}{% endset %}",
    "output": "{% for i in range(90000) %}{{ messages[0].content * 500 }}{% endfor %}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "center method": "{{ 'a'.center(10**9) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "nested format width": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "indent": "{{ 'a'|indent(10**9) }}",
    "big list printed": BIG + "{{ l }}",
    "big list as string": BIG + "{{ l|string }}",
    "big list joined": BIG + "{{ ''.join(l) }}",
    "big list as JSON": BIG + "{{ l|tojson }}",
    "big range": "{{ range(10**9)|list }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "environment": "{{ cycler.__init__.__globals__ }}",
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_cut_off(name: str) -> None:
    """Each would otherwise run for ages, fill the memory or read Python internals."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, limits[1]))
    try:
        with pytest.raises(RequestError) as caught:
            render(HOSTILE[name])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "MemoryError" not in str(caught.value)


def test_internals_print_as_nothing() -> None:
    assert render("[{{ ''.__class__ }}{{ '{0.__class__}'.format(1) }}]") == "[]"


def test_threads_have_their_own_limits() -> None:
    template = ChatTemplate("{% for i in range(messages[0].content) %}{% endfor %}done")
    slow = ChatTemplate(HOSTILE["nested loops"])
    results: list[str] = []

    def run_slow() -> None:
        with pytest.raises(RequestError, match="ran for more than"):
            slow.render(USER)
        results.append("cut off")

    thread = threading.Thread(target=run_slow)
    thread.start()
    for _ in range(20):
        assert template.render([{"role": "user", "content": 100}]) == "done"
    thread.join()
    assert results == ["cut off"]
