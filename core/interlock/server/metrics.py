"""Prometheus metrics: own names, and aliases for the vLLM names that dashboards use.

Units: ``interlock_http_requests`` and ``http_requests`` count HTTP requests; everything named
``sequences`` counts choices (a request with n=2 and two prompts is four sequences). Times start
when the request arrives in the HTTP process. Inter-token latency counts tokens, not chunks: an
output of k tokens after t seconds observes t/k, k times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from interlock.engine.outputs import Output
from interlock.server.client import EngineClient, EngineState
from interlock.server.jobs import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)

# own name without prefix -> (help, buckets)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to the first token of a sequence.", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a sequence.", _SECONDS),
    "e2e_request_latency_seconds": ("Arrival to the last token of a sequence.", _SECONDS),
    "request_queue_time_seconds": ("Time in the waiting queue.", _SECONDS),
    "request_prefill_time_seconds": ("First scheduled to first token.", _SECONDS),
    "request_decode_time_seconds": ("First token to last token.", _SECONDS),
    "request_inference_time_seconds": ("First scheduled to last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a sequence.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a sequence.", _TOKENS),
    "request_max_num_generation_tokens": ("Most generated tokens of a request's n.", _TOKENS),
    "request_params_max_tokens": ("max_tokens as asked for.", _TOKENS),
    "request_params_n": ("n as asked for.", _COUNTS),
}
_COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of finished sequences, cached ones included.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in a prefix cache.",
    "prefix_cache_hits": "Prompt tokens that needed no computation.",
}
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")


class Metrics:
    """All series of one HTTP process."""

    def __init__(self, client: EngineClient, model_name: str = "") -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry(auto_describe=False)
        own, http = CollectorRegistry(auto_describe=False), CollectorRegistry(auto_describe=False)
        labels = ["model_name"]
        self._histograms = {
            name: Histogram(f"interlock_{name}", text, labels, buckets=buckets, registry=own)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"interlock_{name}", text, labels, registry=own)
            for name, text in _COUNTERS.items()
        }
        self._sequences = Counter(
            "interlock_request_success",
            "Sequences that ended, by reason (n=2 counts two).",
            [*labels, "finished_reason"],
            registry=own,
        )
        self._requests = Counter(
            "interlock_http_requests",
            "HTTP requests to the generating routes (n=2 counts one).",
            [*labels, "handler", "status"],
            registry=http,
        )
        names = ["handler", "method", "status"]
        self._http = Counter("http_requests", "HTTP requests.", names, registry=http)
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of HTTP requests, streams to their end.",
            ["handler", "method"],
            buckets=_SECONDS,
            registry=http,
        )
        self._active = Gauge(
            "interlock_http_requests_active", "HTTP requests in progress.", registry=http
        )
        self.registry.register(_Exposition([http], [own, _EngineCollector(client, self)]))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def named(self, model_name: str) -> None:
        """The label ``model_name``, known once the model is; every series starts at 0."""
        self.model_name = model_name
        for reason in FINISH_REASONS:
            self._sequences.labels(model_name, reason)
        for metric in (*self._histograms.values(), *self._counters.values()):
            metric.labels(model_name)

    def http_started(self) -> None:
        self._active.inc()

    def http_finished(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._active.dec()
        self._http.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)
        if handler in ("/v1/completions", "/v1/chat/completions"):
            self._requests.labels(self.model_name, handler, str(status)).inc()

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self.model_name).observe(value)

    def count(self, name: str, value: float) -> None:
        self._counters[name].labels(self.model_name).inc(value)

    def ended(self, reason: str) -> None:
        self._sequences.labels(self.model_name, reason).inc()


class JobMetrics:
    """Observes one job; ``close`` counts what was cut off as aborted."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self._metrics = metrics
        self._job = job
        self._arrival = job.submit.arrival
        self._last_token: dict[str, float] = {}
        self._open = {sequence.id for sequence in job.submit.sequences}
        self._generated: dict[str, int] = {}
        metrics.observe("request_params_n", job.n)
        if job.submit.params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", job.submit.params.max_tokens)

    def take(self, output: Output) -> None:
        now = time.monotonic()
        if output.token_ids:
            self._tokens(output, now)
        if output.finish_reason is not None:
            self._finished(output, now)

    def close(self) -> None:
        for _ in self._open:
            self._metrics.ended("abort")
        self._open.clear()
        if self._generated:
            most = max(self._generated.values())
            self._metrics.observe("request_max_num_generation_tokens", most)

    def _tokens(self, output: Output, now: float) -> None:
        count = len(output.token_ids)
        key = output.request_id
        before = self._last_token.get(key)
        if before is None:
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
        else:
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", (now - before) / count)
        self._last_token[key] = now
        self._generated[key] = self._generated.get(key, 0) + count
        self._metrics.count("generation_tokens", count)

    def _finished(self, output: Output, now: float) -> None:
        self._open.discard(output.request_id)
        reason = output.finish_reason or "error"
        metrics = self._metrics
        metrics.ended(reason if reason in FINISH_REASONS else "error")
        metrics.observe("e2e_request_latency_seconds", now - self._arrival)
        metrics.observe("request_prompt_tokens", output.num_prompt_tokens)
        metrics.observe("request_generation_tokens", output.num_output_tokens)
        metrics.count("prompt_tokens", output.num_prompt_tokens)
        metrics.count("prefix_cache_queries", output.num_prompt_tokens)
        metrics.count("prefix_cache_hits", output.num_cached_tokens)
        if output.timings is not None:
            times = output.timings
            metrics.observe("request_queue_time_seconds", times.queue)
            metrics.observe("request_prefill_time_seconds", times.prefill)
            metrics.observe("request_decode_time_seconds", times.decode)
            metrics.observe("request_inference_time_seconds", times.prefill + times.decode)


class _EngineCollector(Collector):
    """Gauges and counters that the engine process reports."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats, info = self._client.stats, self._client.info
        yield self._gauge("num_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_usage)
        slots = "Recurrent state slots in use, 0 to 1."
        yield self._gauge("state_usage_perc", slots, stats.state_usage)
        preemptions = stats.preemptions_total
        yield self._counter("num_preemptions", "Preemptions by recomputation.", preemptions)
        yield self._gauge("engine_held", "Sequences that a plugin holds.", stats.held)
        for name, value in msgspec.structs.asdict(stats).items():
            if name.endswith("_total"):
                text = "Total of the engine process (seconds, tokens, steps)."
                yield self._counter(f"engine_{name.removesuffix('_total')}", text, value)
        ready = float(self._client.state is EngineState.READY)
        yield self._gauge("engine_ready", "1 if the engine makes progress.", ready)
        config = GaugeMetricFamily(
            "interlock_cache_config_info",
            "Size of the KV cache, in labels.",
            labels=["model_name", "block_size", "num_gpu_blocks", "cache_dtype"],
        )
        name = self._metrics.model_name
        if info is not None:
            config.add_metric([name, str(info.block_size), str(info.num_blocks), info.dtype], 1)
        yield config
        yield from self._plugins()

    def _plugins(self) -> Iterator[Metric]:
        counters = CounterMetricFamily(
            "interlock_plugin_events", "Counters of plugins.", labels=["plugin", "counter"]
        )
        gauges = GaugeMetricFamily(
            "interlock_plugin_now", "Momentary values of plugins.", labels=["plugin", "counter"]
        )
        for plugin in self._client.plugins:
            for counter, value in plugin.counters.items():
                family = gauges if counter.endswith("_now") else counters
                family.add_metric([plugin.name, counter], value)
        yield counters
        yield gauges

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"interlock_{name}", text, labels=["model_name"])
        gauge.add_metric([self._metrics.model_name], value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(f"interlock_{name}", text, labels=["model_name"])
        counter.add_metric([self._metrics.model_name], value)
        return counter


class _Exposition(Collector):
    """Every series, and those of ``aliased`` again under ``vllm:`` where the meaning is the same.

    Creation times are left out: they double the text, and nobody's dashboard reads them.
    """

    OWN_ONLY = ("engine_", "plugin_")

    def __init__(self, plain: Sequence[Any], aliased: Sequence[Any]) -> None:
        self._plain = plain
        self._aliased = aliased

    def collect(self) -> Iterable[Metric]:
        for source in self._plain:
            yield from map(_without_created, source.collect())
        for source in self._aliased:
            for metric in map(_without_created, source.collect()):
                yield metric
                if not metric.name.removeprefix("interlock_").startswith(self.OWN_ONLY):
                    yield _alias(metric)


def _without_created(metric: Metric) -> Metric:
    metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
    return metric


def _alias(metric: Metric) -> Metric:
    alias = Metric(_renamed(metric.name), metric.documentation, metric.type)
    alias.samples = [
        Sample(_renamed(s.name), {**s.labels, "engine": "0"}, s.value, s.timestamp, s.exemplar)
        for s in metric.samples
    ]
    return alias


def _renamed(name: str) -> str:
    return "vllm:" + name.removeprefix("interlock_")
