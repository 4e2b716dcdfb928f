"""`interlock doctor`: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs

from interlock.cli.console import print_json, size, table, warn
from interlock.cli.options import add_settings, settings_of
from interlock.errors import InterlockError
from interlock.settings import Settings

MIN_FREE_DISK = 500 * 10**6
MIN_FREE_MEMORY = 10**9

Level = Literal["ok", "warning", "error"]


@attrs.frozen
class Finding:
    """One line of the report; ``error`` means that serving will not work as asked."""

    area: str
    value: Any
    level: Level = "ok"
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, "engine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything; 1 if something that is needed is broken, else 0."""
    findings = examine(settings_of(args))
    if args.json:
        print_json({"findings": findings})
    else:
        table("", ["check", "result", "state"], [[f.area, f.value, f.level] for f in findings])
        for finding in findings:
            if finding.remedy:
                warn(f"{finding.level}: {finding.area}: {finding.remedy}")
    return 1 if any(f.level == "error" for f in findings) else 0


def examine(settings: Settings) -> list[Finding]:
    """Run all checks; one that raises becomes a finding, so that the others still report."""
    checks: list[Callable[[Settings], list[Finding]]] = [
        machine_findings,
        torch_findings,
        kernel_findings,
        cache_findings,
        model_findings,
        plugin_findings,
    ]
    return [finding for check in checks for finding in _guarded(check, settings)]


def _guarded(check: Callable[[Settings], list[Finding]], settings: Settings) -> list[Finding]:
    area = check.__name__.removesuffix("_findings")
    try:
        return check(settings)
    except InterlockError as error:
        return [Finding(area, "failed", "error", str(error))]
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return [Finding(area, "failed", "error", f"the check itself failed: {detail}")]


def machine_findings(_: Settings) -> list[Finding]:
    import platform

    import psutil

    from interlock.bench.machine import cpu_model, usable_cores

    memory = psutil.virtual_memory()
    return [
        Finding("python", platform.python_version()),
        Finding("system", platform.platform()),
        Finding("cpu", cpu_model()),
        Finding("cpu features", " ".join(cpu_features()) or "none of note"),
        Finding("cores", usable_cores()),
        _memory_finding(memory.available, memory.total),
    ]


def _memory_finding(available: int, total: int) -> Finding:
    text = f"{size(available)} available of {size(total)}"
    if available < MIN_FREE_MEMORY:
        remedy = "close other programs, or lower --kv-cache-bytes and --max-model-len"
        return Finding("memory", text, "warning", remedy)
    return Finding("memory", text)


FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cpu_features() -> list[str]:
    """Instruction sets that the kernels look at, of those that this CPU has."""
    from interlock.bench.machine import CPUINFO

    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    present = set(flags.partition(":")[2].split())
    return [feature for feature in FEATURES if feature in present]


def torch_findings(settings: Settings) -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = f"{error}; reinstall it: pip install --force-reinstall torch"
        return [Finding("torch", "cannot be imported", "error", remedy)]
    found = [Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    return [*found, *_gpu_findings(torch, settings)]


def _gpu_findings(torch: Any, settings: Settings) -> list[Finding]:
    if torch.cuda.is_available():
        return [
            Finding(f"gpu {i}", torch.cuda.get_device_name(i))
            for i in range(torch.cuda.device_count())
        ]
    if settings.engine.device.startswith("cuda"):
        remedy = "use --device cpu, or install a CUDA build of torch and the driver"
        return [Finding("gpu", f"none, but --device is {settings.engine.device}", "error", remedy)]
    return [Finding("gpu", "none; the CPU is used")]


def kernel_findings(settings: Settings) -> list[Finding]:
    """The dtype with its measurement, and which implementation each op takes."""
    from interlock import ops
    from interlock.engine.runner import pick_device, pick_dtype

    device = pick_device(settings.engine.device)
    dtype, reason = pick_dtype(settings.engine.dtype, device)
    name = str(dtype).removeprefix("torch.")
    choices = ops.build(device, dtype, {}).choices
    return [
        Finding("dtype", f"{name}: {reason}"),
        *(Finding(f"op {op}", choice) for op, choice in sorted(choices.items())),
    ]


def cache_findings(_: Settings) -> list[Finding]:
    from interlock.weights.resolve import cache_dir

    folder = cache_dir()
    existing = _existing(folder)
    if not existing.is_dir():
        remedy = "set INTERLOCK_CACHE to a folder"
        return [Finding("model cache", f"{existing} is not a folder", "error", remedy)]
    free = shutil.disk_usage(existing).free
    text = f"{folder} ({size(free)} free)"
    if not os.access(existing, os.W_OK):
        remedy = "set INTERLOCK_CACHE to a folder that you may write to"
        return [Finding("model cache", f"{folder} is not writable", "error", remedy)]
    if free < MIN_FREE_DISK:
        remedy = "free some disk space, or set INTERLOCK_CACHE to another disk"
        return [Finding("model cache", text, "warning", remedy)]
    return [Finding("model cache", text)]


def _existing(folder: Path) -> Path:
    """The folder itself or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def model_findings(settings: Settings) -> list[Finding]:
    from interlock.weights.resolve import ALIASES, is_pulled, resolve

    name = settings.engine.model
    if name in ALIASES and not is_pulled(name):
        remedy = f"the first use downloads it; or run: interlock models pull {name}"
        return [Finding("model", f"{name} is not in the cache", "warning", remedy)]
    files = resolve(name, offline=True)
    return [Finding("model", f"{name}: {files.path}")]


def plugin_findings(settings: Settings) -> list[Finding]:
    from interlock.plugins import Plugins, discover

    installed = discover()
    enabled = Plugins.load(settings.plugins).names
    found = [Finding("plugins installed", ", ".join(info.name for info in installed) or "none")]
    found.append(Finding("plugins enabled", ", ".join(enabled) or "none"))
    names = [info.name for info in installed]
    for name in sorted({name for name in names if names.count(name) > 1}):
        owners = " and ".join(info.distribution for info in installed if info.name == name)
        found.append(Finding(f"plugin {name}", owners, "warning", "uninstall one of the two"))
    return found
