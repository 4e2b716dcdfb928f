"""What a request must satisfy to be queued at all."""

from __future__ import annotations

from collections.abc import Sequence

from interlock.engine.request import Request
from interlock.errors import QueueFullError, RequestError
from interlock.settings import EngineSettings


def check_length(request: Request, max_model_len: int, cache_tokens: int) -> None:
    """Raise RequestError if the prompt is empty, or too long for the context or the cache."""
    if not request.prompt_token_ids:
        raise RequestError("the prompt has no tokens", param="prompt")
    room = min(max_model_len, cache_tokens) - (request.params.max_tokens != 0)
    if request.num_prompt_tokens > room:
        raise RequestError(
            f"the prompt has {request.num_prompt_tokens} tokens, but at most {room} fit "
            f"(context {max_model_len}, KV cache {cache_tokens} tokens)",
            param="prompt",
            code="context_length_exceeded",
        )


def check_queue(request: Request, waiting: Sequence[Request], settings: EngineSettings) -> None:
    """Raise QueueFullError if too many requests, or too many prompt tokens, wait already."""
    if len(waiting) >= settings.max_waiting:
        raise QueueFullError(f"{len(waiting)} requests are waiting, which is the limit")
    most = settings.max_waiting_tokens
    if most is not None and waiting:
        queued = sum(r.num_prompt_tokens for r in waiting)
        if queued + request.num_prompt_tokens > most:
            raise QueueFullError(f"{queued} prompt tokens are waiting, the limit is {most}")
