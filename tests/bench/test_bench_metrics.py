from __future__ import annotations

import pytest

from interlock.bench.metrics import Burst, Spread, Trace, gains, point, summarize


def trace(*arrivals: tuple[float, float], start: float = 0.0, prompt: int = 10) -> Trace:
    return Trace(start, list(arrivals), arrivals[-1][0], prompt)


def test_ttft_and_latency_count_from_submission() -> None:
    t = trace((1.5, 1), (2.0, 1), start=1.0)
    assert t.ttft == 0.5
    assert t.latency == 1.0


def test_a_chunk_of_three_tokens_is_three_intervals() -> None:
    t = trace((1.0, 1), (1.3, 3))
    assert t.itls() == pytest.approx([0.1, 0.1, 0.1])
    assert t.tpot == pytest.approx(0.1)
    assert t.output_tokens == 4


def test_tpot_excludes_the_whole_first_chunk() -> None:
    t = trace((1.0, 4), (1.6, 2), (2.0, 2))
    assert t.tpot == pytest.approx(1.0 / 4)
    assert t.tpot == pytest.approx(sum(t.itls()) / len(t.itls()))


def test_one_chunk_has_no_tpot() -> None:
    assert trace((1.0, 5)).tpot is None
    assert trace((1.0, 5)).itls() == []


def test_a_request_without_tokens_has_no_ttft() -> None:
    assert Trace(0.0, [], 3.0, 10).ttft is None


def test_spread_of_known_numbers() -> None:
    spread = Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert spread is not None
    assert (spread.median, spread.min, spread.max) == (3.0, 1.0, 5.0)
    assert (spread.q25, spread.q75, spread.iqr) == (2.0, 4.0, 2.0)
    assert spread.p99 == pytest.approx(4.96)
    assert spread.count == 5


def test_spread_of_nothing_is_nothing() -> None:
    assert Spread.of([]) is None


def test_throughput_spans_first_submission_to_last_token() -> None:
    burst = Burst([trace((1.0, 1), (2.0, 1)), trace((2.0, 1), (4.0, 1), start=1.0)])
    assert burst.wall == 4.0
    assert point(burst)["output_tps"] == pytest.approx(4 / 4)
    assert point(burst)["total_tps"] == pytest.approx((4 + 20) / 4)


def test_failed_requests_are_counted_and_left_out_of_latencies() -> None:
    failed = Trace(0.0, [(9.0, 1.0)], 9.0, 10, error="boom")
    summary = summarize([Burst([trace((1.0, 1), (2.0, 1)), failed])])
    assert summary.failed == 1
    assert summary.requests["ttft"].max == 1.0


def test_summary_keeps_one_median_per_repeat() -> None:
    bursts = [Burst([trace((t, 1), (t + 1, 1))]) for t in (1.0, 3.0, 2.0)]
    summary = summarize(bursts)
    assert summary.repeats["ttft"] == [1.0, 3.0, 2.0]
    assert summary.requests["ttft"].median == 2.0
    assert (summary.spreads["ttft"].median, summary.spreads["ttft"].iqr) == (2.0, 1.0)


def test_gains_pair_repeats_and_are_above_one_when_the_first_is_better() -> None:
    fast = [Burst([trace((1.0, 1), (2.0, 1))]), Burst([trace((1.0, 1), (3.0, 1))])]
    slow = [Burst([trace((2.0, 1), (4.0, 1))]), Burst([trace((3.0, 1), (9.0, 1))])]
    ratios = gains(fast, slow)
    assert ratios["ttft"] == [2.0, 3.0]
    assert ratios["output_tps"] == [2.0, 3.0]
    assert ratios["tpot"] == [2.0, 3.0]
