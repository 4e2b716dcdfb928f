from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("numba")
from interlock.ops import launch
from interlock.ops.launch import TASK, THREAD, Kernel, team
from interlock.ops.simd import F32, arg, exp, fetch_add, load, put, set_int, splat, store, total


def _census(p: int) -> None:
    """Thread t notes that it was here; all tasks are counted."""
    out = arg(p, 2)
    thread = fetch_add(p + THREAD, 1)
    set_int(out + 8 * (1 + thread), 1)
    task = fetch_add(p + TASK, 1)
    while task < 1000:
        fetch_add(out, 1)
        task = fetch_add(p + TASK, 1)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_kernels_run_on_as_many_threads_as_torch(threads):
    seen = torch.zeros(9, dtype=torch.int64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        Kernel(_census)(team().size, seen.data_ptr())
    finally:
        torch.set_num_threads(before)
    assert seen[0] == 1000
    assert int(seen[1:].sum()) == (threads if "OpenMP" in team().reason else 1)


def test_without_openmp_one_thread_does_the_work(monkeypatch):
    monkeypatch.setattr(launch, "_openmp_libraries", list)
    alone = launch.Team()
    assert alone.size == 1
    assert alone.reason.startswith("one thread")
    seen = torch.zeros(9, dtype=torch.int64)
    kernel = Kernel(_census)
    kernel._team = alone
    kernel(4, seen.data_ptr())
    assert (seen[0], int(seen[1:].sum())) == (1000, 1)


def test_old_llvm_is_refused(monkeypatch):
    monkeypatch.setattr(launch.binding, "llvm_version_info", (15, 0, 7))
    assert "has LLVM 15, 20 is needed" in launch.unsupported()


def _exponentials(p: int) -> None:
    count, x, y = arg(p, 2), arg(p, 3), arg(p, 4)
    for i in range(0, count, 16):
        store(y + 4 * i, exp(load(x + 4 * i, F32)), F32)


def test_exp():
    x = torch.cat([torch.linspace(-87, 88, 15984), torch.zeros(16)])
    y = torch.empty_like(x)
    Kernel(_exponentials)(1, len(x), x.data_ptr(), y.data_ptr())
    assert float((y.double() / x.double().exp() - 1).abs().max()) < 3e-7
    assert (y[-16:] == 1).all()
    x = torch.tensor([float("-inf"), -200, -88, 200, float("inf"), float("nan"), 0, 1] * 2)
    Kernel(_exponentials)(1, len(x), x.data_ptr(), y.data_ptr())
    assert y[:3].tolist() == [0, 0, 0]
    assert (y[3:5] > 1e38).all()
    assert y[5].isnan()


def _sums(p: int) -> None:
    put(arg(p, 2), total(splat(1.5)), F32)


def test_total_of_lanes():
    out = torch.zeros(1)
    Kernel(_sums)(1, out.data_ptr())
    assert out.item() == 24


def test_scratch_grows_with_threads_and_size():
    t = launch.Team()
    address, stride = t.scratch(5000)
    assert stride >= 5000
    assert address % 64 == 0
    again, larger = t.scratch(100_000)
    assert larger >= 100_000
    assert t.scratch(10)[1] == larger
    assert again


def test_compiled_code_is_kept_between_processes_and_follows_the_source(tmp_path):
    """Files appear once for one source; another stamp adds its own instead of using old code."""
    code = (
        "import sys, torch\n"
        "import interlock.ops.launch as launch\n"
        "stamp = launch.source_stamp() + int(sys.argv[1])\n"
        "from interlock.ops import cpu_elementwise as e\n"
        "e.source_stamp = lambda: stamp\n"
        "e.Elementwise(torch.float32)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def files(extra: str) -> int:
        subprocess.run(
            [sys.executable, "-c", code, extra], check=True, timeout=240, env=environment
        )
        return len(list(tmp_path.rglob("*.nbc")))

    first = files("0")
    assert first == 3
    assert files("0") == first
    assert files("1") == 2 * first


def test_folders_that_cannot_be_written_cost_a_compilation_only(monkeypatch):
    def refuse(*args, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function '_sums': no locator available")
        return real(*args, **options)

    real = launch.numba.cfunc
    monkeypatch.setattr(launch.numba, "cfunc", refuse)
    out = torch.zeros(1)
    Kernel(_sums)(1, out.data_ptr())
    assert out.item() == 24
