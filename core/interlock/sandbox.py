"""A Jinja sandbox with bounds on time and memory, for templates that are not trusted.

Jinja's own sandbox keeps templates from Python internals. On top of that every loop turn and
macro call checks a deadline and counts the text that it emits, and operations that can blow a
value up (products, powers, joins, widths of formats) are bounded before they run.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_VALUE: Final = 16 << 20
"""Characters or elements of one value inside a template."""
MAX_EMITTED: Final = 64 << 20
"""Characters that one rendering may write, captured blocks and macros included."""
_WIDE_FORMAT: Final = re.compile(r"\d{7,}")
# Filters that turn nested values into one text.
_FLATTENING: Final = frozenset(
    {"join", "string", "tojson", "pprint", "format", "xmlattr", "escape", "e", "forceescape"}
)


class TemplateLimitError(jinja2.TemplateError):
    """A template ran too long or made too large a value."""


@attrs.define
class Limits:
    """The budget of one rendering."""

    seconds: float
    end: float = attrs.field(init=False, factory=lambda: float("inf"))
    emitted: int = attrs.field(init=False, default=0)


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as the authors of chat templates expect it.

    With trimmed blocks, ``raise_exception``, ``strftime_now``, plain ``tojson``, loop controls and
    ``generation`` blocks. One environment may render in several threads at once.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=self._finalize,
        )
        self._local = threading.local()
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def limited(self, limits: Limits) -> Iterator[None]:
        """Hold the renderings of this thread to ``limits``."""
        limits.end = time.monotonic() + limits.seconds
        self._local.limits = limits
        try:
            yield
        finally:
            del self._local.limits

    def tick(self, emitted: int = 0) -> None:
        """Raise if this thread's rendering has used up its time or its output."""
        limits: Limits | None = getattr(self._local, "limits", None)
        if limits is None:
            return
        limits.emitted += emitted
        if limits.emitted > MAX_EMITTED:
            raise TemplateLimitError(f"it writes more than {MAX_EMITTED} characters")
        if time.monotonic() > limits.end:
            raise TemplateLimitError(f"it ran for more than {limits.seconds:g} seconds")

    def _finalize(self, value: Any) -> Any:
        weight = _weight(value)
        _check_size(weight)
        self.tick(weight)
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then put a check into every loop and macro, and bound every ``~``."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            node.body.insert(0, _tick_statement(_static_text(node), node.lineno))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_join_call(concat)]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "**":
            _check_size(_bits(left) * abs(right) // 8 if isinstance(right, int) else 0)
        elif operator == "*":
            _check_size(_product_size(left, right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.tick()
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            _check_size(sum(map(_weight, args)))
        _check_arguments(subject, args, kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__, ())
        return wrapped

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = getattr(function, "jinja_pass_arg", None)
        first = 0 if passed is None else 1

        def run(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            subject = args[first] if len(args) > first else None
            if name in _FLATTENING and not isinstance(subject, str):
                subject = list(subject) if isinstance(subject, Iterator) else subject
                _check_size(_weight(subject))
                args = (*args[:first], subject, *args[first + 1 :])
            if name == "format":
                _check_format(subject, args[1:])
            _check_arguments(subject, args[first + 1 :], kwargs)
            return _checked(function(*args, **kwargs))

        if passed is not None:
            run.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return run


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2.ext.Extension

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _static_text(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _tick_statement(emitted: int, line: int) -> nodes.ExprStmt:
    target = nodes.EnvironmentAttribute("tick", lineno=line)
    arguments: list[nodes.Expr] = [nodes.Const(emitted, lineno=line)]
    return nodes.ExprStmt(nodes.Call(target, arguments, [], None, None, lineno=line), lineno=line)


def _join_call(concat: nodes.Concat) -> nodes.Expr:
    pieces = nodes.List(list(concat.nodes), lineno=concat.lineno)
    return nodes.Filter(pieces, "join", [], [], None, None, lineno=concat.lineno)


def _check_size(size: int) -> None:
    if size > MAX_VALUE:
        raise TemplateLimitError(f"it makes a value of more than {MAX_VALUE} elements")


def _checked(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict):
        _check_size(len(value))
    elif isinstance(value, int):
        _check_size(value.bit_length())
    return value


def _weight(value: Any) -> int:
    """Roughly the characters of a value written out; stops counting above the limit."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _total(item for pair in value.items() for item in pair)
    return _total(value) if isinstance(value, list | tuple | set | frozenset) else 8


def _total(values: Any) -> int:
    total = 0
    for value in values:
        # An element costs more than its text: nested lists share parts that are visited each time.
        total += 16 + _weight(value)
        if total > MAX_VALUE:
            break
    return total


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _product_size(left: Any, right: Any) -> int:
    for sized, count in ((left, right), (right, left)):
        if isinstance(sized, str | bytes | list | tuple) and isinstance(count, int):
            return len(sized) * max(count, 0)
    return (_bits(left) + _bits(right)) // 8


def _check_format(text: Any, values: Any) -> None:
    if isinstance(text, str) and (_WIDE_FORMAT.search(text) or text.count("*") > 8):
        raise TemplateLimitError("it formats with an absurd width")
    _check_arguments(None, values if isinstance(values, tuple) else (values,), {})


def _check_arguments(subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Bound what a method or filter can make of its arguments: widths, counts, replacements."""
    length = len(subject) if isinstance(subject, str | list | tuple) else 1
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and not isinstance(value, bool):
            _check_size(abs(value))
        elif isinstance(value, str):
            _check_size(len(value) * max(length, 1) if len(value) > 64 else 0)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """JSON as models are trained on it: no HTML escapes."""
    allowed = {k: v for k, v in options.items() if k in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
