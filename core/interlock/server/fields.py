"""Reading a JSON body strictly: every refusal is a 400 that names the field.

NaN, Infinity and numbers that overflow are not JSON numbers; true is not 1; 1.0 is not an
integer; an unknown field is an error; null means "as if it were absent".
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeVar

import msgspec

from interlock.errors import RequestError

MAX_DEPTH = 64
MAX_NAME = 80

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$(?:\.)?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `.*`)?$", re.DOTALL)


def decode(body: bytes, kind: type[T]) -> T:
    """``body`` as a ``kind``. Raises RequestError (400) naming the first field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error)[:200]
        raise RequestError(f"the body is not valid JSON: {text}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep(None) from None


def check_depth(name: str, value: Any) -> None:
    """Raise RequestError if free-form ``value`` is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _too_deep(name)


def shorten(text: str, limit: int = MAX_NAME) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep(name: str | None) -> RequestError:
    what = name or "the body"
    return RequestError(f"{what} is nested too deeply (at most {MAX_DEPTH} levels)", param=name)


def _invalid(text: str, kind: type[msgspec.Struct]) -> RequestError:
    place = _PATH.search(text)
    if unknown := _UNKNOWN.match(text):
        prefix = f"{place['path']}." if place and place["path"] else ""
        return _unknown_field(prefix, unknown["name"], kind)
    if place is None or not place["path"]:
        return RequestError(f"the body must be a JSON object: {shorten(text, 200)}")
    path = shorten(place["path"])
    return RequestError(f"{path}: {shorten(text[: place.start()], 200)}", param=path)


def _unknown_field(prefix: str, name: str, kind: type[msgspec.Struct]) -> RequestError:
    known = () if prefix else kind.__struct_fields__
    near = difflib.get_close_matches(name[:MAX_NAME], known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    param = prefix + shorten(name)
    return RequestError(f"unknown field {param!r}{hint}", param=param, code="unknown_parameter")
