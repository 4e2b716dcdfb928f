"""How far a result may be from its oracle, by dtype, stated once: largest absolute difference of
values of about unit size. Nothing may widen them."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that ``found``, computed in ``dtype``, is ``wanted`` within the tolerance."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    scale = max(1.0, float(wanted.abs().max()))
    worst = float((found.double() - wanted.double()).abs().max()) / scale
    assert worst <= TOLERANCE[dtype], f"{worst:.2e} exceeds {TOLERANCE[dtype]:.0e} in {dtype}"
