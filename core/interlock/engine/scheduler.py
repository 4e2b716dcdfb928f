"""Who computes which tokens in the next step, and what becomes of the results.

There is no prefill phase and no decode phase: ``num_computed_tokens`` chases ``num_tokens``, and
a chunk, a draft, a cached prefix and a remote prefix are the same arithmetic. `Scheduler.plan`
reserves memory and makes rows; `Scheduler.commit` is the only place where tokens advance.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from interlock.cache import sources
from interlock.cache.blocks import blocks_for
from interlock.cache.ledger import Ledger
from interlock.engine import states, stopping
from interlock.engine.arrival import check_length, check_queue
from interlock.engine.batch import Plan, Row, order_key
from interlock.engine.budget import Budget
from interlock.engine.drafting import propose
from interlock.engine.memory import Memory
from interlock.engine.outputs import Output, final
from interlock.engine.request import Request, Status
from interlock.errors import RequestError, describe_error
from interlock.extension import ChunkLimit, Drafter, Geometry, KVSource, StateExports

if TYPE_CHECKING:
    from interlock.engine.hooks import WarmHooks
    from interlock.engine.sampler import RowResult
    from interlock.settings import EngineSettings

# Logits of a whole chunk are needed for prompt log-probabilities; this bounds their memory.
PROMPT_LOGPROBS_CHUNK = 128


def rank(request: Request) -> tuple[int, int]:
    """Order of service: lower priority value first, then order of arrival."""
    return request.priority, request.sequence_number


class Scheduler:
    """Queues, memory and rows. One thread; nothing here blocks or touches a device."""

    def __init__(
        self,
        settings: EngineSettings,
        geometry: Geometry,
        hooks: WarmHooks,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self.hooks = hooks
        self.eos_token_ids = frozenset(eos_token_ids)
        self.memory = Memory(
            geometry.num_blocks, geometry.block_size, hooks.reclaim, geometry.num_states
        )
        self.ledger = Ledger()
        self.sources: Sequence[tuple[str, KVSource]] = ()
        self.limits: Sequence[tuple[str, ChunkLimit]] = ()
        self.exports: Sequence[tuple[str, StateExports]] = ()
        self.drafter: Drafter | None = None
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_failed = 0
        self.num_cached_tokens = 0
        self._ended: list[Request] = []
        self._outputs: list[Output] = []
        self._suspects: list[Request] = []
        self._preempted: list[Request] = []
        self._arrivals = 0
        self._step = 0

    # -- arrival and departure -----------------------------------------------------------------

    @property
    def max_len(self) -> int:
        """Longest sequence that the model and the pool can hold."""
        return min(self.geometry.max_model_len, self.memory.num_tokens)

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestError if it can never run."""
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        check_length(request, self.geometry.max_model_len, self.memory.num_tokens)
        check_queue(request, self.waiting, self.settings)
        max_tokens = request.params.max_tokens
        limit = self.max_len if max_tokens is None else request.num_prompt_tokens + max_tokens
        request.token_limit = min(limit, self.max_len)
        self._arrivals += 1
        request.sequence_number = self._arrivals
        self.requests[request.id] = request
        bisect.insort(self.waiting, request, key=rank)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its last output comes with the next commit."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def has_work(self) -> bool:
        return bool(self.requests or self._ended or self._outputs)

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        if request.finished:
            return
        request.finish_reason, request.error = reason, error
        self.num_failed += reason == "error"
        text = request.text.finish() if request.text else ""
        self._retire(request)
        self._outputs.append(final(request, Output(request.id, text=text)))

    def _retire(self, request: Request) -> None:
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status = Status.FINISHED
        request.draft_tokens = []
        del self.requests[request.id]
        self._ended.append(request)

    def _release_ended(self) -> None:
        """Tell plugins about ended requests, then drop what they hold."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        try:
            self.hooks.requests_finished(ended)
        finally:
            for request in ended:
                self._free(request)

    def _free(self, request: Request) -> None:
        self.ledger.abort(request.id)
        self.memory.free(request)

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Rows for the next step, in partition order, with memory for all they write."""
        self._expire(time.monotonic())
        self._release_ended()
        self._step += 1
        plan = Plan(self._step)
        budget = Budget(*[self.settings.max_num_batched_tokens] * 2)
        self._suspects = [r for r in self._suspects if _still_suspect(r)]
        if self._suspects:
            self._plan_alone(self._suspects[0], plan, budget)
        else:
            preemptions = self.num_preemptions
            self._plan_running(plan, budget)
            self._plan_waiting(plan, budget, preemptions)
        plan.rows.sort(key=order_key)
        if self._preempted:
            preempted, self._preempted = self._preempted, []
            self.hooks.requests_preempted(preempted)
        return plan

    def _plan_alone(self, request: Request, plan: Plan, budget: Budget) -> None:
        waits = request.status is Status.WAITING
        self._guard(request, self._admit if waits else self._extend, plan, budget)

    def _plan_running(self, plan: Plan, budget: Budget) -> None:
        # One-token rows first: a long prompt must not delay anybody's next token.
        order = sorted(self.running, key=lambda r: (r.is_prefilling, *rank(r)))
        for request in order:
            if budget.tokens <= 0:
                return
            if request.status is Status.RUNNING and not request.holds:
                self._guard(request, self._extend, plan, budget)

    def _plan_waiting(self, plan: Plan, budget: Budget, preemptions: int) -> None:
        for request in list(self.waiting):
            full = len(self.running) >= self.settings.max_num_seqs or budget.tokens <= 0
            # Whoever was preempted just now would only take the memory back.
            if full or self.num_preemptions > preemptions:
                return
            if request.holds:
                continue
            if self._guard(request, self._admit, plan, budget) is False:
                return

    def _guard(self, request: Request, action: Any, plan: Plan, budget: Budget) -> bool | None:
        """Run one request's planning; an exception ends that request alone."""
        try:
            done: bool = action(request, plan, budget)
        except Exception as error:
            self._finish(request, "error", describe_error(error))
            plan.forget(request)
            return None
        return done

    def _extend(self, request: Request, plan: Plan, budget: Budget) -> bool:
        """A row for a running request. False if it gets none in this step."""
        start = request.num_computed_tokens
        end = self._clip(request, start, budget)
        if end <= start:
            return False
        if not self._grow(request, end, plan, budget):
            self._preempt(request, plan, budget)
            return False
        self._append_row(request, start, end, plan, budget)
        return True

    def _clip(self, request: Request, start: int, budget: Budget) -> int:
        """Where this step's tokens of ``request`` end; not beyond any limit."""
        drafts = 0 if request.is_prefilling else len(request.draft_tokens)
        # Accepted drafts and the token after them must fit the sequence's limit.
        end = max(request.num_tokens, min(request.num_tokens + drafts, request.token_limit - 1))
        end = min(end, start + budget.room(self._slots(request)))
        if request.wants_prompt_logprobs:
            end = min(end, start + PROMPT_LOGPROBS_CHUNK)
        for _, limit in self.limits:
            end = min(end, limit.clip(request, start, end))
        return end

    def _slots(self, request: Request) -> int:
        return self.drafter.input_slots(request) if self.drafter else 0

    def _append_row(
        self, request: Request, start: int, end: int, plan: Plan, budget: Budget
    ) -> None:
        drafts = request.draft_tokens[: max(0, end - request.num_tokens)]
        num_logits = 1 + len(drafts) if end >= request.num_tokens else 0
        if request.wants_prompt_logprobs:
            num_logits = end - start
        row = Row(request, start, end - start, drafts, num_logits, request.is_prefilling)
        if request.is_prefilling and request.state_slot is not None:
            row.exports = states.exports(self.exports, request, start, end)
        budget.charge(row.num_tokens, self._slots(request))
        request.first_scheduled = request.first_scheduled or time.monotonic()
        plan.rows.append(row)

    # -- memory --------------------------------------------------------------------------------

    def _grow(self, request: Request, end: int, plan: Plan, budget: Budget) -> bool:
        """Blocks for tokens up to ``end``, preempting lesser requests if needed."""
        while not self.memory.grow(request, end, plan):
            victim = max(self.running, key=rank)
            if rank(victim) <= rank(request):
                return False
            self._preempt(victim, plan, budget)
        return True

    def _preempt(self, request: Request, plan: Plan, budget: Budget) -> None:
        """Take a request's memory; it will be computed again from its tokens."""
        for row in plan.rows:
            if row.request is request:
                budget.charge(-row.num_tokens, -self._slots(request))
        plan.forget(request)
        self._requeue(request)
        self._preempted.append(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.draft_tokens = []
        request.prefill_target = request.num_tokens
        request.holds.clear()
        bisect.insort(self.waiting, request, key=rank)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, request: Request, plan: Plan, budget: Budget) -> bool:
        """Move a waiting request to running. False if there is no room for it yet."""
        size, stateful = self.memory.block_size, self.memory.has_states
        shares = sources.chain(self.sources, request, size, stateful=stateful)
        room = self._place(request, shares, budget)
        if room is False and shares and not self.running:
            # What it shares may be all that fills the memory: then sharing nothing frees it.
            shares = sources.nothing(shares)
            room = self._place(request, shares, budget)
        if not room:
            # Skipped by a limit (None): nobody behind it has to wait for that.
            return room is None
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = start = shares[-1].stop if shares else 0
        request.num_cached_tokens = max(request.num_cached_tokens, start)
        self.num_cached_tokens += start
        for share in shares:
            share.source.settle(request, share.start, share.match.num_tokens)
        if not request.holds:
            self._extend(request, plan, budget)
        return True

    def _place(
        self, request: Request, shares: Sequence[sources.Share], budget: Budget
    ) -> bool | None:
        """Memory for the shares and the tokens after them; None if a limit allows no token now."""
        start = shares[-1].stop if shares else 0
        end = self._clip(request, start, budget)
        if end <= start:
            return None
        table = sources.table(shares, self.memory.block_size)
        state = sources.state(shares) if self.memory.has_states else None
        return self.memory.place(request, table, start, end, len(self.running), state)

    # -- results -------------------------------------------------------------------------------

    def commit(self, plan: Plan, results: Sequence[RowResult]) -> list[Output]:
        """Advance every row by what was accepted; returns what the step produced."""
        spans = []
        for row, result in zip(plan.rows, results, strict=True):
            if row.request.finished:
                continue
            if result.error is not None:
                self._finish(row.request, "error", result.error)
                continue
            self._advance(row, result)
            self.ledger.commit(row.request.id, row.request.num_computed_tokens)
            spans.append((row.request, row.start, row.request.num_computed_tokens))
        if spans:
            self.hooks.kv_committed(spans)
        self._release_ended()
        self._draft()
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self, row: Row, result: RowResult) -> None:
        request = row.request
        request.draft_tokens = []
        request.prompt_logprobs.extend(result.prompt_logprobs)
        if not row.samples:
            request.num_computed_tokens = row.stop
            return
        output = Output(request.id)
        if request.num_tokens < request.token_limit:
            self._append_tokens(request, result, output)
            request.num_computed_tokens = request.num_tokens - 1
        else:
            request.num_computed_tokens = row.stop
            request.finish_reason = "length"
        self._emit(request, output)

    def _append_tokens(self, request: Request, result: RowResult, output: Output) -> None:
        if request.first_token is None:
            request.first_token = time.monotonic()
        for token in result.accepted:
            output.text += stopping.append(request, token, self.eos_token_ids)
            output.token_ids.append(token)
            if request.finish_reason is not None:
                break
        if result.logprobs is not None:
            output.logprobs = result.logprobs[: len(output.token_ids)]

    def _emit(self, request: Request, output: Output) -> None:
        if request.num_output_tokens == len(output.token_ids):
            output.num_cached_tokens = request.num_cached_tokens
            if request.params.prompt_logprobs is not None:
                output.prompt_logprobs = request.prompt_logprobs
        if request.finish_reason is not None:
            output.text += request.text.finish() if request.text else ""
            self._retire(request)
            final(request, output)
        self._outputs.append(output)

    def _draft(self) -> None:
        if self.drafter is None:
            return
        ready = [r for r in self.running if not r.is_prefilling and not r.holds]
        proposals = propose(self.drafter, ready, self.geometry.vocab_size)
        for request, drafts in zip(ready, proposals, strict=True):
            if isinstance(drafts, Exception):
                self._finish(request, "error", describe_error(drafts))
            else:
                request.draft_tokens = drafts

    # -- trouble -------------------------------------------------------------------------------

    def isolate(self, plan: Plan, error: BaseException) -> None:
        """A step failed. Its rows run again one by one, so that only the culprit ends.

        A half-finished step may have written anything, so every row starts over from its tokens.
        """
        if len(plan.rows) == 1:
            self._finish(plan.rows[0].request, "error", describe_error(error))
            return
        for row in plan.rows:
            if not row.request.finished:
                self._requeue(row.request)
                row.request.suspect_until = row.stop
                self._suspects.append(row.request)

    def fail_running(self, error: BaseException) -> None:
        """End everything that was running, when a fault has no single owner."""
        for request in list(self.running):
            self._finish(request, "error", describe_error(error))

    def _expire(self, now: float) -> None:
        for request in list(self.requests.values()):
            if request.deadline is not None and now > request.deadline:
                self._finish(request, "timeout")
                continue
            late = [n for n, limit in request.holds.items() if limit is not None and now > limit]
            if late:
                self._finish(request, "error", f"{late[0]} did not deliver in time")

    def check(
        self, extra: Collection[Sequence[int]] = (), extra_states: Collection[Sequence[int]] = ()
    ) -> None:
        """Raise AssertionError unless every reference to blocks and states is accounted for.

        ``extra`` and ``extra_states`` list those that plugins hold.
        """
        everyone = (*self.running, *self.waiting, *self._ended)
        self.memory.pool.check([*(r.block_table for r in everyone), *extra])
        slots = [[r.state_slot] for r in everyone if r.state_slot is not None]
        self.memory.states.check([*slots, *extra_states])
        for request in self.running:
            assert request.num_computed_tokens <= request.num_tokens
            needed = blocks_for(request.num_computed_tokens, self.memory.block_size)
            assert needed <= len(request.block_table)


def _still_suspect(request: Request) -> bool:
    return not request.finished and request.num_computed_tokens < request.suspect_until
