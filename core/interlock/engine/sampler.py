"""From logits to accepted tokens: plain sampling, verification of drafts, log-probabilities.

Every random choice is made by one uniform number that depends on the request's key and the
position only. So a seed gives the same tokens whatever the batch holds, after a preemption, and
with drafts: a draft is accepted exactly if it is the token that would have been chosen anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import torch
import xxhash
from torch import Tensor

from interlock.engine import stopping
from interlock.engine.batch import Plan, Row
from interlock.engine.outputs import TokenLogprob
from interlock.engine.request import Request, SamplingParams
from interlock.errors import describe_error
from interlock.extension import LogitsProcessor

# Nucleus sampling looks at so many candidates first; only a flatter distribution is sorted whole.
CANDIDATES = 1024


@attrs.define(slots=True)
class RowResult:
    """What one row yields. ``error`` ends its request and nobody else's."""

    accepted: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] = attrs.field(factory=list)
    error: str | None = None


class Sampler:
    """Chooses tokens for a plan's rows, each row on its own."""

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.processors: Sequence[tuple[str, LogitsProcessor]] = ()

    @torch.inference_mode()
    def accept(self, plan: Plan, logits: Tensor) -> list[RowResult]:
        """One result per row. ``logits`` [S, V] in row order, ``Row.num_logits`` for each."""
        if not len(logits):
            return [RowResult() for _ in plan.rows]
        # A maximum carries NaN along, so one pass finds both the greedy tokens and broken rows.
        best, ids = logits.max(dim=-1)
        broken = (~torch.isfinite(best)).tolist()
        greedy = ids.tolist()
        results, begin = [], 0
        for row in plan.rows:
            end = begin + row.num_logits
            results.append(self._row(row, logits[begin:end], greedy[begin:end], broken[begin:end]))
            begin = end
        return results

    def _row(self, row: Row, logits: Tensor, greedy: list[int], broken: list[bool]) -> RowResult:
        if any(broken):
            return RowResult(error="the model produced NaN or infinite logits for this request")
        result = RowResult()
        try:
            if row.request.wants_prompt_logprobs:
                result.prompt_logprobs = _prompt_logprobs(row, logits)
            if row.samples:
                first = row.num_logits - 1 - len(row.draft_tokens)
                self._choose(row, logits[first:], greedy[first:], result)
        except Exception as error:
            return RowResult(error=describe_error(error))
        return result

    def _choose(self, row: Row, logits: Tensor, greedy: list[int], result: RowResult) -> None:
        """Walk over the drafts; the first token that differs from its draft is the last."""
        params, drafts = row.request.params, row.draft_tokens
        plain = params.greedy and not self._reshapes(row.request)
        if params.logprobs is not None:
            result.logprobs = []
        for offset, likeliest in enumerate(greedy):
            token = likeliest if plain else self._sample(row, offset, logits[offset])
            result.accepted.append(token)
            if result.logprobs is not None:
                entry = token_logprob(logits[offset], token, params.logprobs or 0)
                result.logprobs.append(entry)
            if offset < len(drafts) and token != drafts[offset]:
                return

    def _reshapes(self, request: Request) -> bool:
        params = request.params
        waits = request.num_output_tokens < params.min_tokens
        return bool(self.processors) or params.reshapes_logits or waits

    def _sample(self, row: Row, offset: int, raw: Tensor) -> int:
        request = row.request
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
        context = request.token_ids + row.draft_tokens[:offset]
        for _, processor in self.processors:
            logits = processor.apply([request], [offset], logits[None])[0]
        reshape(logits, request.params, context, request.num_prompt_tokens)
        if len(context) - request.num_prompt_tokens < request.params.min_tokens:
            banned = stopping.stop_ids(request.params, self.eos_token_ids)
            logits[list(banned)] = -torch.inf
        if not torch.isfinite(logits.max()):
            raise ValueError("no token is left to choose after penalties, bias and plugins")
        if request.params.greedy:
            return int(logits.argmax())
        return draw(logits, request.params, uniform(request.rng_key, len(context)))


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) that depends on ``key`` and ``position`` only (xxh3, 53 bits)."""
    data = key.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (xxhash.xxh3_64_intdigest(data) >> 11) * 2.0**-53


def reshape(
    logits: Tensor, params: SamplingParams, context: list[int], num_prompt_tokens: int
) -> None:
    """Apply bias, penalties and allowed ids in place, before temperature. ``logits`` [V] float32.

    The repetition penalty (Keskar et al., 2019) counts prompt and output tokens, as transformers
    does; presence and frequency penalties count output tokens, as OpenAI documents.
    """
    if not params.reshapes_logits:
        return
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(context)), device=logits.device)
        values = logits[seen]
        scale = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / scale, values * scale)
    output = context[num_prompt_tokens:]
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(output), minlength=len(logits)).to(logits.device)
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        # OpenAI: 100 and -100 mean exclusive selection and a ban, whatever the logits are.
        logits[token] = -torch.inf if bias <= -100 else logits[token] + bias
    forced = [token for token, bias in params.logit_bias.items() if bias >= 100]
    allowed = forced or params.allowed_token_ids
    if allowed:
        keep = torch.tensor(list(allowed), device=logits.device)
        kept = logits[keep]
        logits.fill_(-torch.inf)
        logits[keep] = kept


def draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """Token at quantile ``u`` of the distribution that the parameters leave of ``logits`` [V]."""
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_p >= 1.0 and params.top_k <= 0 and params.min_p <= 0.0:
        return _at_quantile(probs, u)
    values, order = _candidates(probs, params)
    keep = values >= params.min_p * values[0]
    # The token that crosses top_p belongs to the nucleus (Holtzman et al., 2020).
    before = values.double().cumsum(-1) - values.double()
    keep &= before < params.top_p
    keep[0] = True
    return int(order[_at_quantile(values * keep, u)])


def _candidates(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The most likely tokens in descending order: enough of them for top_k, top_p and min_p."""
    size = len(probs)
    if params.top_k > 0:
        values, order = probs.topk(min(params.top_k, size))
        return values, order
    values, order = probs.topk(min(CANDIDATES, size))
    enough = float(values.double().sum()) >= params.top_p and params.top_p < 1.0
    if enough or float(values[-1]) < params.min_p * float(values[0]):
        return values, order
    values, order = probs.sort(descending=True, stable=True)
    return values, order


def _at_quantile(weights: Tensor, u: float) -> int:
    """Index where the running sum of ``weights`` exceeds the share ``u``; never one of weight 0."""
    sums = weights.double().cumsum(-1)
    index = int(torch.searchsorted(sums, u * sums[-1], right=True))
    if index >= len(weights) or float(weights[index]) <= 0.0:
        index = int(weights.nonzero()[-1])
    return index


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Log-probability of ``token`` and the ``count`` likeliest under the model's own ``logits``."""
    row = torch.log_softmax(logits.float(), dim=-1)
    value = row[token]
    top = row.topk(count) if count else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else []
    return TokenLogprob(token, float(value), int((row > value).sum()) + 1, pairs)


def _prompt_logprobs(row: Row, logits: Tensor) -> list[TokenLogprob | None]:
    """Entries for the prompt tokens that this chunk predicts; the first token has none."""
    request = row.request
    count = request.params.prompt_logprobs or 0
    known = len(request.prompt_logprobs)
    entries: list[TokenLogprob | None] = [None] if known == 0 else []
    last = min(row.stop + 1, request.num_prompt_tokens)
    for position in range(max(row.start + 1, known + len(entries)), last):
        token = request.prompt_token_ids[position]
        entries.append(token_logprob(logits[position - 1 - row.start], token, count))
    return entries
