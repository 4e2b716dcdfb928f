"""Compile numba kernels and run them on the OpenMP threads that torch already has.

A second thread pool would fight torch's for the cores: its idle threads spin where torch's
should work. So a kernel is a C function started by the OpenMP runtime's own entry point, on the
same team as torch's operators. Kernels claim their tasks from a counter, so a thread that was
descheduled delays the others by one task at most.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding
from numba import types

TASK, THREAD, ARGS = 0, 8, 2
"""A kernel's argument block: task counter, thread counter (byte offsets), then its arguments."""
SCRATCH_ALIGN = 4096
OLDEST_LLVM = 20


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of the CPU's instruction sets, as LLVM spells them (``avx512bf16``)."""
    return frozenset(k for k, on in binding.get_host_cpu_features().items() if on)


def unsupported() -> str | None:
    """Why kernels can't be compiled here, or None."""
    version = binding.llvm_version_info
    if version[0] < OLDEST_LLVM:
        return f"numba {numba.__version__} has LLVM {version[0]}, {OLDEST_LLVM} is needed"
    if struct.calcsize("P") != 8:
        return "not a 64-bit machine"
    return None


@functools.cache
def source_stamp() -> int:
    """Hash of this package's sources.

    numba's cache looks at one function and its file only; kernels hold this number in a closure,
    which is part of the cache key, so that a change in any helper recompiles them.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:6], "little")


class Team:
    """torch's OpenMP threads, or the calling thread alone where they can't be reached."""

    def __init__(self) -> None:
        self._parallel = _openmp_entry()
        self.reason = (
            "torch's own OpenMP threads"
            if self._parallel
            else "one thread: no GOMP_parallel in this process"
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._stride = 0

    @property
    def size(self) -> int:
        return torch.get_num_threads() if self._parallel else 1

    def run(self, kernel: Kernel, block: bytes, threads: int) -> None:
        if threads > 1 and self._parallel is not None:
            self._parallel(kernel.address, block, threads, 0)
        else:
            kernel.alone(block)

    def scratch(self, size: int) -> tuple[int, int]:
        """(address, bytes per thread) of at least ``size`` bytes of memory for every thread."""
        threads = self.size
        if self._stride < size or self._scratch.numel() < threads * self._stride + SCRATCH_ALIGN:
            self._stride = -(-max(size, self._stride) // SCRATCH_ALIGN) * SCRATCH_ALIGN
            self._scratch = torch.empty(threads * self._stride + SCRATCH_ALIGN, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64, self._stride


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def _openmp_entry() -> Callable[[int, bytes, int, int], None] | None:
    """The ``GOMP_parallel`` that torch itself is bound to (libgomp and libomp both have it)."""
    for library in _openmp_libraries():
        try:
            entry = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        # c_char_p hands over the address of the block's bytes; kernels count inside it.
        entry.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        entry.restype = None
        return _typed(entry)
    return None


def _typed(entry: Any) -> Callable[[int, bytes, int, int], None]:
    call: Callable[[int, bytes, int, int], None] = entry
    return call


def _openmp_libraries() -> list[str | None]:
    """The process's global names first (that is how torch found it), then torch's own folder."""
    if not torch.backends.openmp.is_available():
        return []
    folder = Path(torch.__file__).parent
    found = sorted([*(folder / "lib").glob("libgomp*"), *folder.parent.glob("torch.libs/libgomp*")])
    return [None, *map(str, found)]


@functools.cache
def team() -> Team:
    """The process's team: OpenMP has one, however many engines there are."""
    return Team()


class Kernel:
    """A compiled kernel: ``kernel(threads, *int64 arguments)``."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._compiled = _compile(function)
        self.address: int = self._compiled.address
        self.alone: Callable[[bytes], None] = _CALL(self.address)
        self._team = team()

    def __call__(self, threads: int, *arguments: int) -> None:
        block = struct.pack(f"{ARGS + len(arguments)}q", 0, 0, *arguments)
        self._team.run(self, block, threads)


def _compile(function: Callable[[int], None]) -> Any:
    signature = types.void(types.int64)
    try:
        return numba.cfunc(signature, error_model="numpy", cache=True)(function)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        return numba.cfunc(signature, error_model="numpy")(function)
