"""Every error that a user may see, each with the one-line remedy in its message."""

from __future__ import annotations


class InterlockError(Exception):
    """Base of all errors that are shown to a user as one line, without a traceback."""


class ConfigError(InterlockError):
    """A setting, flag or configuration file is wrong; the message names the key."""


class PluginError(InterlockError):
    """A requested plugin is missing, broken or in conflict with another one."""


class WeightsError(InterlockError):
    """A model file is missing, truncated or malformed; the message names file and tensor."""


class ModelNotFoundError(InterlockError):
    """No model of that name or path exists; the message lists what was tried."""


class RequestError(InterlockError):
    """A request that cannot be served as asked.

    ``param`` names the field at fault, ``code`` is OpenAI's machine-readable code
    (``context_length_exceeded``, for example) and ``status`` the HTTP status.
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFullError(RequestError):
    """The waiting queue is at its bound; the client should retry after ``retry_after_s``."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class EngineDeadError(InterlockError):
    """The engine process has ended; every request that it held fails with this error."""


def describe_error(error: BaseException) -> str:
    """One line for a client: type, message and plugin notes, without a traceback."""
    return f"{type(error).__name__}: {with_notes(error)}"[:500]


def with_notes(error: BaseException) -> str:
    """The message, and which plugin and hook it came from."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)
