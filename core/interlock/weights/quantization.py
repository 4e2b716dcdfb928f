"""What a configuration says about quantized weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interlock.errors import WeightsError
from interlock.weights.fields import Fields

GROUP: Final = 32
"""Inputs that share one scale in packed weights."""
PACKED_FORMAT: Final = "mxfp4-pack-quantized"
_PACKED: Final = {"num_bits": 4, "group_size": GROUP, "type": "float", "symmetric": True}


def refuse_quantization(fields: Fields) -> None:
    """Which tensors are packed is seen from the files; how, only from here."""
    quantization = fields.data.get("quantization_config")
    if not quantization:
        return
    kind = quantization.get("format") if isinstance(quantization, dict) else quantization
    if kind != PACKED_FORMAT:
        raise WeightsError(
            f"{fields.path}: quantization_config.format {kind!r} is not supported; "
            f"only {PACKED_FORMAT}, or unquantized weights"
        )
    groups = quantization.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            _check_packing(weights, f"{fields.path}: quantization_config.config_groups.{name}")


def _check_packing(weights: Mapping[str, Any], where: str) -> None:
    for key, wanted in _PACKED.items():
        if (found := weights.get(key, wanted)) != wanted:
            raise WeightsError(f"{where}.weights.{key} must be {wanted!r}, not {found!r}")
