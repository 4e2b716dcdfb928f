"""Arrival times of tokens, and the latency and throughput figures that follow from them.

Definitions: TTFT is the time from submission to the first delta of any kind (text, reasoning
or tool call). ITL is the time between two tokens: a chunk of k tokens that comes t seconds after
the previous one counts as k intervals of t / k. TPOT is the mean of a request's ITLs, so the
first token (the whole first chunk, when it holds several) is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Trace(msgspec.Struct):
    """One request as the client saw it; times are seconds on any one monotonic clock.

    ``arrivals`` holds ``(time, tokens)`` per chunk that brought tokens. ``estimated`` says that
    the split of tokens over the chunks was inferred from the final count.
    """

    start: float
    arrivals: list[tuple[float, float]]
    end: float
    prompt_tokens: int
    error: str | None = None
    estimated: bool = False

    @property
    def output_tokens(self) -> int:
        return round(sum(tokens for _, tokens in self.arrivals))

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0][0] - self.start if self.arrivals else None

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first chunk; None for a single chunk."""
        later = sum(tokens for _, tokens in self.arrivals[1:])
        if not later:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later

    def itls(self) -> list[float]:
        """Seconds before each token after the first chunk."""
        gaps: list[float] = []
        for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            count = max(1, round(tokens))
            gaps += [(now - before) / tokens] * count
        return gaps


class Burst(msgspec.Struct):
    """All requests of one measured repeat, plus what the machine did meanwhile."""

    traces: list[Trace]
    others_cpu: float | None = None
    """CPU used by processes outside the benchmark, as a share of all cores (0..1)."""
    counters: dict[str, dict[str, float]] = {}
    """How far each plugin's counters moved during the repeat."""
    engine: dict[str, float] = {}
    """The engine's own totals over the repeat (steps, python share, preemptions)."""
    resident_bytes: int = 0
    """Memory of the engine's process that was in RAM afterwards; 0 if that is not known."""

    @property
    def failed(self) -> list[str]:
        return [t.error for t in self.traces if t.error is not None]

    @property
    def wall(self) -> float:
        """Seconds from the first submission to the last token."""
        return max(t.end for t in self.traces) - min(t.start for t in self.traces)

    @property
    def output_tokens(self) -> int:
        return sum(t.output_tokens for t in self.traces)

    @property
    def prompt_tokens(self) -> int:
        return sum(t.prompt_tokens for t in self.traces)


class Spread(msgspec.Struct):
    """Order statistics of a sample: what is reported instead of a mean."""

    median: float
    p99: float
    min: float
    max: float
    q25: float
    q75: float
    count: int

    @property
    def iqr(self) -> float:
        return self.q75 - self.q25

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Statistics of ``values``, or None when there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        q = {p: quantile(ordered, p) for p in (0.25, 0.5, 0.75, 0.99)}
        ends = (ordered[0], ordered[-1])
        return cls(q[0.5], q[0.99], *ends, q25=q[0.25], q75=q[0.75], count=len(ordered))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linearly interpolated quantile (the definition numpy calls ``linear``)."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


LATENCIES = ("ttft", "tpot", "itl", "latency")
THROUGHPUTS = ("output_tps", "total_tps")
METRICS = LATENCIES + THROUGHPUTS


class Summary(msgspec.Struct):
    """One configuration at one concurrency over all repeats.

    ``requests`` pools the requests of every repeat (seconds; ITL pools tokens); ``repeats``
    has one value per repeat for each of `METRICS`: the median of the latencies, or tokens/s.
    ``spreads`` describes those values: median, range and quartiles over the repeats.
    """

    requests: dict[str, Spread]
    repeats: dict[str, list[float]]
    spreads: dict[str, Spread]
    failed: int
    estimated: bool


def samples(burst: Burst) -> dict[str, list[float]]:
    """Seconds of each latency metric over the requests of one repeat."""
    good = [t for t in burst.traces if t.error is None]
    return {
        "ttft": [t.ttft for t in good if t.ttft is not None],
        "tpot": [t.tpot for t in good if t.tpot is not None],
        "itl": [gap for t in good for gap in t.itls()],
        "latency": [t.latency for t in good],
    }


def point(burst: Burst) -> dict[str, float]:
    """The value of every metric for one repeat; metrics without data are left out."""
    values = {name: spread.median for name, spread in _spreads(samples(burst)).items()}
    if burst.wall > 0:
        values["output_tps"] = burst.output_tokens / burst.wall
        values["total_tps"] = (burst.output_tokens + burst.prompt_tokens) / burst.wall
    return values


def summarize(bursts: Sequence[Burst]) -> Summary:
    pooled: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for burst in bursts:
        for name, values in samples(burst).items():
            pooled[name] += values
    points = [point(burst) for burst in bursts]
    repeats = {m: [p[m] for p in points if m in p] for m in METRICS}
    return Summary(
        requests=_spreads(pooled),
        repeats=repeats,
        spreads=_spreads(repeats),
        failed=sum(len(burst.failed) for burst in bursts),
        estimated=any(t.estimated for burst in bursts for t in burst.traces),
    )


def _spreads(values: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    spreads = {name: Spread.of(numbers) for name, numbers in values.items()}
    return {name: spread for name, spread in spreads.items() if spread}


def gains(first: Sequence[Burst], second: Sequence[Burst]) -> dict[str, list[float]]:
    """How many times better ``first`` was than ``second`` in each repeat, by metric.

    Above 1 the first is better: throughput is first / second, latency second / first.
    """
    pairs = [(point(a), point(b)) for a, b in zip(first, second, strict=True)]
    return {m: [_gain(m, a[m], b[m]) for a, b in pairs if a.get(m) and b.get(m)] for m in METRICS}


def _gain(metric: str, first: float, second: float) -> float:
    return first / second if metric in THROUGHPUTS else second / first
