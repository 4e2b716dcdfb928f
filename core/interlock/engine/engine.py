"""The engine: five lines of loop, and what it takes to build and to feed them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from interlock.engine import build, states
from interlock.engine.batch import Plan
from interlock.engine.hooks import WarmHooks
from interlock.engine.outputs import EngineStats, Output, StepStats, TextStream
from interlock.engine.request import Request, check_token_ids
from interlock.engine.sampler import RowResult, Sampler
from interlock.engine.scheduler import Scheduler
from interlock.errors import EngineDeadError, describe_error
from interlock.plugins import PluginReport, Plugins, configure, stderr_line
from interlock.settings import Settings

if TYPE_CHECKING:
    from interlock.engine.runner import Progress
    from interlock.tokenizer import Tokenizer

log = logging.getLogger("interlock")

# A fault that comes back in every step is not one request's fault.
MAX_FAILED_STEPS = 8


class Engine:
    """One model, one loop. Not thread safe; several engines fit in one process."""

    def __init__(
        self,
        settings: Settings,
        *,
        progress: Progress | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        started = time.monotonic()
        self.settings = settings
        self.plugins = plugins or Plugins.load(settings.plugins)
        if settings.engine.trace_hooks:
            self.plugins.trace(stderr_line)
        configure(self.plugins, settings)
        self.runner, self.tokenizer = build.runner(settings, self.plugins, progress)
        self.hooks = WarmHooks(self.plugins, self)
        eos = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        self.sampler = Sampler(eos)
        self.scheduler = Scheduler(
            settings.engine, self.runner.geometry, self.hooks, eos_token_ids=eos
        )
        build.connect(self)
        self.info = build.describe(self, time.monotonic() - started)
        self._stats = EngineStats()
        self._failed_steps = 0

    def step(self) -> list[Output]:
        """Advance every request that can be; returns what that produced."""
        clock, outputs = Clock(), list[Output]()
        plan, results = Plan(0), list[RowResult]()
        try:
            self.hooks.poll()
            plan = self.scheduler.plan()
            clock.lap("plan_s")
            if plan.rows:
                logits = self.runner.forward(plan)
                clock.lap("forward_s")
                results = self.sampler.accept(plan, logits)
                states.settle(self.runner, plan, results)
                clock.lap("sample_s")
            outputs = self.scheduler.commit(plan, results)
            clock.lap("commit_s")
            if plan.rows:
                self._step_done(plan, results, outputs, clock)
            self._failed_steps = 0
        except Exception as error:
            outputs += self._step_failed(plan, results, error)
        return outputs

    # -- requests --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError naming the field, or QueueFullError."""
        vocab_size = self.runner.geometry.vocab_size
        request.params.validate(vocab_size)
        check_token_ids("prompt", request.prompt_token_ids, vocab_size)
        self.plugins.check_options(request)
        self._set_deadline(request)
        if self.tokenizer is not None:
            request.text = self._text_stream(request, self.tokenizer)
        self.scheduler.add(request)
        self._stats.prompt_tokens_total += request.num_prompt_tokens

    def _set_deadline(self, request: Request) -> None:
        limit = self.settings.engine.request_timeout_s
        if limit is not None:
            latest = request.arrival + limit
            request.deadline = min(request.deadline or latest, latest)

    def _text_stream(self, request: Request, tokenizer: Tokenizer) -> TextStream:
        params = request.params
        bytes_of = tokenizer.visible(skip_special_tokens=params.skip_special_tokens)
        return TextStream(bytes_of, params.stop, params.include_stop_str_in_output)

    def abort(self, request_id: str) -> bool:
        """End a request; the next step returns its last output, reason ``abort``."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    # -- what it says about itself ---------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Totals and gauges as of now, plugins' counters included."""
        scheduler, stats = self.scheduler, self._stats
        stats.running = len(scheduler.running)
        stats.waiting = len(scheduler.waiting)
        stats.held = sum(bool(r.holds) for r in scheduler.requests.values())
        stats.kv_usage = scheduler.memory.pool.usage
        stats.num_blocks = scheduler.memory.pool.num_blocks
        stats.state_usage = scheduler.memory.states.usage
        stats.num_states = scheduler.memory.states.num_blocks
        stats.preemptions_total = scheduler.num_preemptions
        stats.cached_tokens_total = scheduler.num_cached_tokens
        stats.failed_requests_total = scheduler.num_failed
        stats.plugin_counters = self._counters()
        return stats

    def _counters(self) -> dict[str, dict[str, float]]:
        try:
            answers = self.plugins.each("interlock_counters", engine=self)
            return {name: {k: float(v) for k, v in counts.items()} for name, counts in answers}
        except Exception as error:
            # Statistics that cannot be had are no reason to end what runs.
            log.error("no plugin counters: %s", describe_error(error))
            return {}

    def plugin_report(self) -> list[PluginReport]:
        return self.plugins.reports(self._counters())

    def close(self) -> None:
        """End all requests and let plugins drop what they hold."""
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)
        self.scheduler.plan()
        self.plugins.close(self)
        close = getattr(self.runner, "close", None)
        if close is not None:
            close()

    # -- after a step ----------------------------------------------------------------------------

    def _step_done(
        self, plan: Plan, results: list[RowResult], outputs: list[Output], clock: Clock
    ) -> None:
        stats = StepStats(
            step=plan.step,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
            num_draft_tokens=sum(len(row.draft_tokens) for row in plan.rows),
            num_accepted_tokens=sum(max(0, len(r.accepted) - 1) for r in results),
            **clock.laps,
        )
        self._stats.add(stats)
        self.hooks.step_done(stats)

    def _step_failed(self, plan: Plan, results: list[RowResult], error: Exception) -> list[Output]:
        """Find who is to blame: rows of a failed forward run again alone, hooks end what ran."""
        if isinstance(error, EngineDeadError):
            raise error
        log.error("step failed: %s", describe_error(error), exc_info=error)
        self._failed_steps += 1
        # Isolated rows may all fail, one step each; beyond that it is nobody's request.
        if self._failed_steps > self.settings.engine.max_num_seqs + MAX_FAILED_STEPS:
            raise EngineDeadError(f"every step fails: {describe_error(error)}") from error
        if plan.rows and not results:
            self.scheduler.isolate(plan, error)
        else:
            self.scheduler.fail_running(error)
        return self.scheduler.take_outputs()


class Clock:
    """Times of a step's parts in seconds, by name."""

    __slots__ = ("_last", "laps")

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
