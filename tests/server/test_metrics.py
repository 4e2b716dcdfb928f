"""/metrics: names, units and that they move (reports MET-01, MET-03, MET-05)."""

from __future__ import annotations

import re
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.harness import eventually, gauge, serving

TEXT = "/v1/completions"
VLLM_NAMES = [
    *(f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting")),
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_count",
    "vllm:request_max_num_generation_tokens_count",
]


class Change:
    """How much the samples of /metrics grew since this object was made."""

    def __init__(self, http):
        self.http = http
        self.before = self.samples()

    def samples(self):
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}

    def of(self, name, **labels):
        wanted = labels.items()
        now = self.samples()
        return sum(
            value - self.before.get(key, 0)
            for key, value in now.items()
            if key[0] == name and wanted <= dict(key[1]).items()
        )


def test_the_names_of_dashboards_exist_and_equal_our_own(http):
    http.post(TEXT, json={"prompt": "!say ab", "n": 2})
    samples = Change(http).before
    totals = {}
    for (name, labels), value in samples.items():
        assert dict(labels).get("model_name", "fake") == "fake"
        totals[name] = totals.get(name, 0) + value
    for name in VLLM_NAMES:
        assert totals[name] == totals[name.replace("vllm:", "interlock_")], name


def test_text_is_valid_and_small(http):
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "_created" not in answer.text
    assert len(re.findall("^# TYPE interlock_request_success ", answer.text, re.M)) <= 1


def test_requests_and_sequences_are_separate_series(http):
    change = Change(http)
    http.post(TEXT, json={"prompt": ["!say a", "!say b"], "n": 2})
    assert change.of("interlock_http_requests_total", status="200") == 1
    assert change.of("interlock_request_success_total", finished_reason="stop") == 4
    assert change.of("vllm:request_success_total", finished_reason="stop") == 4
    assert change.of("interlock_request_params_n_count") == 1
    assert change.of("interlock_request_params_n_sum") == 2


def test_tokens_and_latencies_count_tokens_not_chunks(http):
    change = Change(http)
    http.post(TEXT, json={"prompt": "!chunk 3 !say abcdefgh", "stream": True})
    assert change.of("interlock_generation_tokens_total") == 9
    assert change.of("interlock_prompt_tokens_total") == len("!chunk 3 !say abcdefgh")
    assert change.of("interlock_time_to_first_token_seconds_count") == 1
    assert change.of("interlock_inter_token_latency_seconds_count") == 6
    assert change.of("interlock_request_generation_tokens_sum") == 9


def test_first_token_time_starts_at_arrival(http):
    change = Change(http)
    http.post(TEXT, json={"prompt": "!stall 0.3 !say a"})
    assert change.of("interlock_time_to_first_token_seconds_sum") >= 0.3
    assert change.of("interlock_e2e_request_latency_seconds_sum") >= 0.3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "!say a"}, "stop"),
        ({"prompt": "x", "max_tokens": 1}, "length"),
        ({"prompt": "!error"}, "error"),
        ({"prompt": "!slow 0.05 x", "max_tokens": 400, "timeout_s": 0.3}, "timeout"),
    ],
)
def test_reasons(http, body, reason):
    change = Change(http)
    http.post(TEXT, json=body)
    assert change.of("interlock_request_success_total", finished_reason=reason) == 1
    assert change.of("interlock_request_success_total") == 1


def test_http_requests_by_handler_method_and_status(http):
    change = Change(http)
    http.get("/v1/models/fake")
    http.get("/v1/models/other")
    http.get("/nope/1")
    http.get("/nope/2")
    http.post(TEXT, json={"prompt": "a", "n": 0})
    total = "http_requests_total"
    assert change.of(total, handler="/v1/models/<model_id:path>", status="200") == 1
    assert change.of(total, handler="/v1/models/<model_id:path>", status="404") == 1
    assert change.of(total, handler="other", status="404") == 2
    assert change.of(total, handler=TEXT, method="POST", status="400") == 1
    assert change.of("http_request_duration_seconds_count", handler=TEXT) == 1


def test_plugin_counters_are_shown(http):
    samples = Change(http).before
    assert samples["interlock_engine_steps_total", frozenset({("model_name", "fake")})] > 0
    labels = frozenset({("plugin", "fake"), ("counter", "tokens")})
    assert samples["interlock_plugin_events_total", labels] > 0
    now = frozenset({("plugin", "fake"), ("counter", "level_now")})
    assert samples["interlock_plugin_now", now] == 1
    (plugin,) = http.get("/plugins").json()["plugins"]
    assert plugin["name"] == "fake"
    assert plugin["counters"]["tokens"] > 0


def test_gauges_return_to_zero_without_new_traffic():
    body = b'{"prompt":"!slow 0.02 x","max_tokens":500,"stream":true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    with serving() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sockets = [
            socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(100)
        ]
        for sock in sockets:
            sock.sendall(head + body)
        eventually(lambda: gauge(http, "interlock_num_requests_running") == 64)
        assert gauge(http, "interlock_num_requests_waiting") == 36
        assert gauge(http, "interlock_kv_cache_usage_perc") == 1
        for sock in sockets:
            sock.close()
        time.sleep(2)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            eventually(lambda name=name: gauge(http, f"interlock_{name}") == 0)
        eventually(lambda: gauge(http, "interlock_http_requests_active") == 1)
