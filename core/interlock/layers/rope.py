"""Rotary position embedding: the table of cosines and sines that `rope_store` reads.

Frequencies follow Su et al. (RoFormer), stretched by position interpolation (``linear``), the
frequency bands of Llama 3.1 (``llama3``) or YaRN (Peng et al. 2023, ``yarn``). Everything is
computed in float32 in the order of operations that checkpoints are trained with, whatever the
dtype of the model: half an ulp in a frequency grows with the position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from interlock.weights.config import ModelConfig, RopeScaling


def cos_sin_table(config: ModelConfig, length: int, divisors: Tensor | None = None) -> Tensor:
    """Table [length, 2, head_dim / 2] float32: cosines, then sines.

    ``divisors`` [head_dim / 2] divide the frequencies further (GGUF files of Llama 3 carry them).
    """
    frequencies, scale = inverse_frequencies(config)
    if divisors is not None:
        frequencies = frequencies / divisors.to(torch.float32)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)


def frequencies_table(dim: int, base: float, length: int) -> Tensor:
    """Table [length, 2, dim / 2] float32 of plain rotary embedding: cosines, then sines."""
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] / periods
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32, and the factor on cosines and sines."""
    scaling, dim, base = config.rope_scaling, config.head_dim, config.rope_theta
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling.kind == "linear":
        return 1.0 / periods / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(1.0 / periods, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(periods, scaling, dim, base), _yarn_scale(scaling)
    return 1.0 / periods, 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between are blended."""
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    slowed = torch.where(waves > context / low, frequencies / scaling.factor, frequencies)
    blend = (context / waves - low) / (high - low)
    between = (1 - blend) * slowed / scaling.factor + blend * slowed
    is_between = ~(waves < context / high) & ~(waves > context / low)
    return torch.where(is_between, between, slowed)


def _yarn(periods: Tensor, scaling: RopeScaling, dim: int, base: float) -> Tensor:
    """Frequencies that turn often in the original context are kept, slow ones interpolated."""
    low, high = _yarn_range(scaling, dim, base)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_range(scaling: RopeScaling, dim: int, base: float) -> tuple[float, float]:
    """Dimensions that turn ``beta_fast`` and ``beta_slow`` times in the original context."""
    context = scaling.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_scale(scaling: RopeScaling) -> float:
    """Attention temperature of YaRN, as a factor on both cosine and sine."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        above = _mscale(scaling.factor, scaling.mscale)
        return above / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
