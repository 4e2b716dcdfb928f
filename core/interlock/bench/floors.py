"""Lower bounds of this machine for a load, and how near a measurement came to them.

Prefill: multiply-adds of all matrices and of causal attention, over the measured GEMM peak.
Decode: bytes of all matrices, dense in the engine's dtype, plus the keys and values of every
running sequence, over the measured read bandwidth. Both count nothing else. An engine that keeps
weights packed, or computes with 8 bits, moves less than that and may come below.
"""

from __future__ import annotations

import msgspec

from interlock.bench.spec import Load
from interlock.weights.config import DTYPE_BYTES, ModelConfig


class Floors(msgspec.Struct, frozen=True):
    """Seconds that a burst of ``concurrency`` requests takes at the very least."""

    prefill_s: float
    """One prompt."""
    decode_step_s: float
    """One step at this concurrency, halfway through the output."""
    burst_s: float
    """All requests of the load, prompts and outputs."""


def layer_parameters(config: ModelConfig) -> int:
    """Weights of all matrices except embedding and head."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp)


def dense_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes that one decode step reads of the weights: every layer's matrices and the head."""
    head = config.vocab_size * config.hidden_size
    return (layer_parameters(config) + head) * DTYPE_BYTES[dtype]


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Two per weight and token, plus causal attention; the head computes the last token only."""
    linear = 2.0 * layer_parameters(config) * tokens
    # Q K^T and P V: 2 flops x 2 products x tokens^2 / 2 pairs x head width, per layer.
    attention = 2.0 * tokens * tokens * config.q_size * config.num_hidden_layers
    return linear + attention + 2.0 * config.vocab_size * config.hidden_size


def floors(
    config: ModelConfig,
    load: Load,
    *,
    dtype: str,
    kv_bytes_per_token: int,
    bytes_per_s: float,
    flops_per_s: float,
) -> Floors:
    """Floors for ``load`` from the machine's measured rates (bytes/s read, flop/s of a GEMM)."""
    prefill = prefill_flops(config, load.prompt_tokens) / flops_per_s
    context = load.prompt_tokens + load.output_tokens / 2
    moved = dense_bytes(config, dtype) + load.concurrency * context * kv_bytes_per_token
    step = moved / bytes_per_s
    waves = load.num_requests / load.concurrency
    burst = load.num_requests * prefill + waves * (load.output_tokens - 1) * step
    return Floors(prefill_s=prefill, decode_step_s=step, burst_s=burst)


def probe_machine(dtype: str) -> dict[str, float]:
    """Measured rates for ``dtype``: ``bytes_per_s`` and ``flops_per_s``. Imports torch."""
    import torch

    from interlock.ops.cpu_probe import measure_floors

    return measure_floors(getattr(torch, dtype))
