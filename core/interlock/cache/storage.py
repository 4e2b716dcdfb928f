"""Memory for caches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor whose pages cost memory only once they are written, where that is possible.

    `torch.zeros` writes them all, so a generous cache would take its whole size at start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    # Vector loads that straddle cache lines would cost twice.
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
