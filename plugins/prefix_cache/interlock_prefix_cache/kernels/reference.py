"""What the kernel computes, in PyTorch: every sequence by itself, with the core's `kda_chunk`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interlock.ops.kda import kda_chunk


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    lengths: Sequence[int],
    slots: Sequence[int],
    exports: Sequence[Sequence[tuple[int, int]]],
) -> Tensor:
    """Outputs [T, H, V] of packed sequences; ``states`` [slots, H, K, V] is written.

    q (scaled), k and g (log decay) [T, H, K]; v [T, H, V]; beta [T, H]. Sequence i has
    ``lengths[i]`` tokens, goes on from ``states[slots[i]]`` and leaves its last state there; for
    each (position, slot) of ``exports[i]``, positions being multiples of 16 inside the sequence,
    ``states[slot]`` becomes the state after ``position`` of its tokens.
    """
    parts, start = [torch.zeros_like(v[:0])], 0
    for length, slot, wanted in zip(lengths, slots, exports, strict=True):
        rows = slice(start, start + length)
        start += length
        if not length:
            continue
        positions = sorted({position for position, _ in wanted})
        out, state, found = kda_chunk(
            q[rows], k[rows], v[rows], g[rows], beta[rows], states[slot], positions
        )
        for position, target in wanted:
            states[target] = found[positions.index(position)]
        states[slot] = state
        parts.append(out)
    return torch.cat(parts)
