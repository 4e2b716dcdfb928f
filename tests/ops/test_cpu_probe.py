from __future__ import annotations

import json

import pytest
import torch

from interlock.ops import cpu_probe


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_probe, "_file", lambda: tmp_path / "deep" / "cpu_probe.json")
    return tmp_path / "deep" / "cpu_probe.json"


def rates(monkeypatch, bf16, fp32):
    calls = []

    def compare():
        calls.append(1)
        return {"bfloat16": bf16, "float32": fp32}

    monkeypatch.setattr(cpu_probe, "_compare", compare)
    return calls


def test_without_the_instructions_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(cpu_probe, "bf16_feature", lambda: None)
    calls = rates(monkeypatch, 1, 1)
    dtype, reason, measured = cpu_probe.pick_dtype()
    assert (dtype, measured, calls) == (torch.float32, {}, [])
    assert "neither AVX512-BF16 nor AMX" in reason


def test_the_measurement_decides(monkeypatch):
    monkeypatch.setattr(cpu_probe, "bf16_feature", lambda: "AMX")
    rates(monkeypatch, 300.0, 100.0)
    dtype, reason, measured = cpu_probe.pick_dtype(cached=False)
    assert (dtype, measured["bfloat16"]) == (torch.bfloat16, 300.0)
    assert reason == "AMX, bf16 products are 3.0x as fast as float32"
    rates(monkeypatch, 50.0, 100.0)
    dtype, reason, _ = cpu_probe.pick_dtype(cached=False)
    assert dtype == torch.float32
    assert "only 0.5x" in reason


def test_a_measurement_is_kept(monkeypatch, cache):
    monkeypatch.setattr(cpu_probe, "bf16_feature", lambda: "AMX")
    calls = rates(monkeypatch, 300.0, 100.0)
    first, second = cpu_probe.pick_dtype(), cpu_probe.pick_dtype()
    assert first == second
    assert len(calls) == 1
    cache.write_text("{broken")
    assert cpu_probe.choose_dtype() == torch.bfloat16
    assert len(calls) == 2
    monkeypatch.setattr(cpu_probe, "cpu_model", lambda: "another CPU")
    cpu_probe.pick_dtype()
    assert len(calls) == 3
    assert next(iter(json.loads(cache.read_text()))).startswith("another CPU | torch ")


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cpu_probe, "_file", lambda: tmp_path / "file" / "x.json")
    monkeypatch.setattr(cpu_probe, "bf16_feature", lambda: "AMX")
    rates(monkeypatch, 3.0, 1.0)
    assert cpu_probe.choose_dtype() == torch.bfloat16


def test_real_measurements_are_positive(monkeypatch):
    assert min(cpu_probe._compare().values()) > 0
    real = torch.ones
    small = {(32 * 1024 * 1024,): (4096,), (2048, 2048): (8, 8)}
    monkeypatch.setattr(torch, "ones", lambda *s, **kw: real(*small.get(s, s), **kw))
    floors = cpu_probe.measure_floors(torch.float32)
    assert set(floors) == {"bytes_per_s", "flops_per_s"}
    assert min(floors.values()) > 0


def test_features_are_read_from_the_system():
    assert isinstance(cpu_probe.cpu_flags(), frozenset)
    assert cpu_probe.cpu_model()
    assert cpu_probe.bf16_feature() in (None, "AMX", "AVX512-BF16")
