"""What this CPU can do: the dtype to run in, and the rates that bound any engine on it."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

GAIN = 1.0
"""By what factor bf16 must beat float32: not more, as it also halves the memory traffic."""
_SHAPE = (256, 576, 1536)
"""Rows, inputs and outputs of the product that is compared (about 2 ms in float32 on two cores)."""


def pick_dtype(*, cached: bool = True) -> tuple[torch.dtype, str, dict[str, float]]:
    """The dtype for this CPU, why, and what was measured (GFLOP/s by dtype, maybe empty).

    bf16 where the CPU multiplies it in hardware and a product of a model's shape confirms that it
    is faster. The measurement (some 50 ms) is kept in the cache folder, by CPU and torch version.
    """
    feature = bf16_feature()
    if feature is None:
        return torch.float32, "the CPU has neither AVX512-BF16 nor AMX", {}
    rates = _remembered() if cached else None
    if rates is None:
        rates = _compare()
        _remember(rates)
    gain = rates["bfloat16"] / rates["float32"]
    if gain < GAIN:
        return torch.float32, f"{feature}, but bf16 products are only {gain:.1f}x as fast", rates
    return torch.bfloat16, f"{feature}, bf16 products are {gain:.1f}x as fast as float32", rates


def choose_dtype() -> torch.dtype:
    """The dtype alone, of `pick_dtype`."""
    return pick_dtype()[0]


def bf16_feature() -> str | None:
    """The instruction set by which this CPU multiplies bf16, or None."""
    flags = cpu_flags()
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return name
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return "AVX512-BF16" if supported is not None and supported() else None


def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them; empty elsewhere."""
    return frozenset(_cpuinfo("flags").split())


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return ""


def _key() -> str:
    return f"{cpu_model()} | torch {torch.__version__} | {torch.get_num_threads()} threads"


def _file() -> Path:
    from interlock.weights.resolve import cache_dir

    return cache_dir() / "cpu_probe.json"


def _remembered() -> dict[str, float] | None:
    try:
        rates = json.loads(_file().read_text(encoding="utf-8"))[_key()]
        return {name: float(rates[name]) for name in ("bfloat16", "float32")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(rates: dict[str, float]) -> None:
    """Keep a measurement; a folder that can't be written costs 50 ms at the next start."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({_key(): rates}), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return


def _compare() -> dict[str, float]:
    """GFLOP/s of both dtypes, alternated so that a busy machine slows both."""
    rows, inputs, outputs = _SHAPE
    runs: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        runs[str(dtype).removeprefix("torch.")] = functools.partial(linear, x, w)
    best = _fastest(runs, repeats=8)
    flops = 2 * rows * inputs * outputs
    return {name: flops / seconds / 1e9 for name, seconds in best.items()}


def _fastest(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest of ``repeats`` alternated calls of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure_floors(dtype: torch.dtype | None = None) -> dict[str, float]:
    """Rates of this machine that no engine can beat, about a second to measure.

    ``bytes_per_s``: reading 256 MiB, more than any cache; ``flops_per_s``: a product of
    2048 x 2048 matrices in ``dtype`` (default: the one that `pick_dtype` picks).
    """
    data = torch.ones(32 * 1024 * 1024, dtype=torch.int64)
    square = torch.ones(2048, 2048, dtype=dtype or choose_dtype())
    best = _fastest({"read": data.sum, "product": lambda: square @ square}, repeats=6)
    return {
        "bytes_per_s": data.nbytes / best["read"],
        "flops_per_s": 2 * 2048**3 / best["product"],
    }
