"""When a sequence ends: end-of-sequence and stop tokens, stop strings, lengths."""

from __future__ import annotations

from collections.abc import Collection

from interlock.engine.request import Request, SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """Token ids that end a sequence with these parameters."""
    eos = () if params.ignore_eos else eos_token_ids
    return {*eos, *params.stop_token_ids}


def append(request: Request, token: int, eos_token_ids: Collection[int]) -> str:
    """Add an accepted token; returns the text that is now certain, sets ``finish_reason`` if due.

    The end-of-sequence token counts as a completion token, but is no text; so does a stop token,
    unless ``include_stop_str_in_output`` shows it.
    """
    params = request.params
    request.token_ids.append(token)
    may_stop = request.num_output_tokens >= params.min_tokens
    if may_stop and token in stop_ids(params, eos_token_ids):
        return _stop_at_token(request, token, eos_token_ids)
    text = request.text.push(token) if request.text else ""
    if may_stop and request.text and request.text.stopped_by is not None:
        request.finish_reason, request.stop_reason = "stop", request.text.stopped_by
    elif request.num_tokens >= request.token_limit:
        request.finish_reason = "length"
    return text


def _stop_at_token(request: Request, token: int, eos_token_ids: Collection[int]) -> str:
    request.finish_reason = "stop"
    is_eos = token in eos_token_ids and token not in request.params.stop_token_ids
    request.stop_reason = None if is_eos else token
    if request.params.include_stop_str_in_output and not is_eos and request.text:
        return request.text.push(token)
    return ""
