"""Reading JSON files of models, with errors that name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from interlock.errors import WeightsError

_MAX_BYTES: Final = 64 << 20


def read_json(path: Path) -> Any:
    """Parse a JSON file; `WeightsError` names the file and the position of an error."""
    try:
        if path.stat().st_size > _MAX_BYTES * 8:
            raise WeightsError(f"{path} is absurdly large for a JSON file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON, perhaps cut short: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


class Fields:
    """Typed access to a JSON object, with errors that name the file and the key."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path = path
        self.data = data

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise WeightsError(f"{self.path}: {key} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
            raise WeightsError(f"{self.path}: {key} must be a non-negative integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise WeightsError(f"{self.path}: {key} must be a positive number, not {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.data.get(key) is None else self.number(key)

    def optional_integer(self, key: str) -> int | None:
        return None if self.data.get(key) is None else self.integer(key)

    def optional_real(self, key: str) -> float | None:
        """A number of either sign, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise WeightsError(f"{self.path}: {key} must be a number, not {value!r}")
        return float(value)

    def object(self, key: str) -> Fields:
        """The JSON object under ``key``, whose errors name the same file."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise WeightsError(f"{self.path}: {key} must be an object, not {value!r}")
        return Fields(self.path, value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise WeightsError(f"{self.path}: {key} must be true or false, not {value!r}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            raise WeightsError(f"{self.path}: {key} must be token ids, not {value!r}")
        return tuple(items)
