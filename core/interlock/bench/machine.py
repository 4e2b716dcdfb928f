"""The machine under the benchmark: what it is, and how much of it others were using."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """CPU model, usable and physical cores, memory in bytes, system and Python version."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "physical_cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on (containers often allow fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class OthersGauge:
    """CPU time used by processes other than ours, as a share of all cores.

    Numbers of a benchmark that shared its cores are numbers of its neighbours; every repeat
    therefore says how much of the machine it had.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = {os.getpid(), *pids}
        self._began = time.monotonic()
        self._busy = _busy_seconds()
        self._ours = _cpu_seconds(self._pids)

    def share(self) -> float | None:
        """Since construction, 0..1; None if the machine does not tell."""
        elapsed = time.monotonic() - self._began
        cores = psutil.cpu_count() or 1
        if elapsed <= 0:
            return None
        ours = _cpu_seconds(self._pids) - self._ours
        others = _busy_seconds() - self._busy - ours
        return min(1.0, max(0.0, others / (cores * elapsed)))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # guest time is already part of user time
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0))


def _cpu_seconds(pids: Iterable[int]) -> float:
    processes: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            processes[pid] = parent
            processes.update((child.pid, child) for child in parent.children(recursive=True))
        except psutil.Error:
            continue
    return sum(_process_seconds(process) for process in processes.values())


def _process_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def listening_pids(port: int) -> list[int]:
    """Processes of this machine that listen on a TCP port; empty where that may not be asked."""
    try:
        connections: Sequence[Any] = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    return sorted(
        {c.pid for c in connections if c.pid and c.status == "LISTEN" and c.laddr.port == port}
    )
