"""Builds a model without an engine and runs token sequences through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from interlock import ops
from interlock.engine.batch import Batch, Row
from interlock.engine.request import Request, SamplingParams
from interlock.models.registry import build_model
from interlock.weights.config import load_config
from interlock.weights.resolve import local_files

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def load(path: Path, dtype: torch.dtype = torch.float64, num_blocks: int = 64) -> Any:
    """The model at ``path`` with the reference ops of ``dtype`` and ``num_blocks`` blocks."""
    files = local_files(path)
    model = build_model(
        files,
        load_config(files),
        ops=ops.build(CPU, dtype, {}),
        linear_method=lambda **layer: None,
        extra_models={},
        dtype=dtype,
        device=CPU,
    )
    model.allocate_caches(num_blocks, BLOCK_SIZE, *states_of(model))
    return model


def states_of(model: Any, count: int = 4) -> tuple[int, ...]:
    """``count`` state slots for a model that has states, as an argument list."""
    return (count,) if model.state_bytes_per_slot() else ()


def generate(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Prompts continued greedily by ``count`` tokens, all in one batch, with the cache."""
    blocks = -(-(max(map(len, prompts)) + count) // BLOCK_SIZE)
    model.allocate_caches(blocks * len(prompts), BLOCK_SIZE)
    requests = [Request(str(i), ids, SamplingParams()) for i, ids in enumerate(prompts)]
    for index, request in enumerate(requests):
        request.block_table = list(range(index * blocks, (index + 1) * blocks))
    for step in range(count):
        starts = [0 if step == 0 else request.num_tokens - 1 for request in requests]
        rows = [
            Row(request, start, request.num_tokens - start, [], 1, is_prefilling=step == 0)
            for request, start in zip(requests, starts, strict=True)
        ]
        hidden = model.forward(Batch.build(rows, BLOCK_SIZE, CPU))
        for request, token in zip(requests, model.logits(hidden).argmax(-1), strict=True):
            request.token_ids.append(int(token))
    return [request.token_ids for request in requests]


def logits(model: Any, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """Logits [T, V] of a sequence, computed ``chunk`` tokens at a time."""
    request = Request("r", token_ids, SamplingParams())
    request.block_table = list(range(-(-len(token_ids) // BLOCK_SIZE)))[::-1]
    if states_of(model):
        request.state_slot = 1
        model.clear_states([1])
    step = chunk or len(token_ids)
    parts = []
    for start in range(0, len(token_ids), step):
        count = min(step, len(token_ids) - start)
        row = Row(request, start, count, [], count, is_prefilling=True)
        parts.append(model.logits(model.forward(Batch.build([row], BLOCK_SIZE, CPU))))
    return torch.cat(parts)
