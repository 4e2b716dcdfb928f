"""A runner without a model, strict about memory, for testing everything around the forward pass.

A token's cache entry depends on every token before it, is read back through the block table, and
decides the next logits. So a wrong block, an unwritten slot, a stale tenant or a published draft
changes tokens instead of going unnoticed. `expected_tokens` computes the same without any cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from interlock.engine.batch import Batch, Plan
from interlock.engine.engine import Engine
from interlock.engine.outputs import Output
from interlock.engine.request import Request, SamplingParams
from interlock.extension import Geometry
from interlock.hookspec import hookimpl
from interlock.plugins import Plugins
from interlock.settings import EngineSettings, Settings

VOCAB = 64
UNWRITTEN = 0


def entry(previous: int, token: int) -> int:
    data = previous.to_bytes(8, "little") + token.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(data) | 1


def logits_of(entries: list[int]) -> np.ndarray:
    digest = xxhash.xxh3_64_intdigest(np.array(entries, dtype=np.uint64).tobytes())
    return np.random.default_rng(digest).normal(size=VOCAB).astype(np.float32) * 3


def entries_of(tokens: list[int]) -> list[int]:
    result, last = [], 1
    for token in tokens:
        last = entry(last, token)
        result.append(last)
    return result


class SimRunner:
    """Satisfies `interlock.extension.Runner`."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 256) -> None:
        self.geometry = Geometry(num_blocks, block_size, max_model_len, VOCAB)
        self.cache = [UNWRITTEN] * (num_blocks * block_size)
        self.plans: list[list[tuple[str, int, int]]] = []
        self.fail: dict[str, Exception] = {}
        self.nan: set[str] = set()

    def forward(self, plan: Plan) -> torch.Tensor:
        self.plans.append([(r.request.id, r.start, r.stop) for r in plan.rows])
        size = self.geometry.block_size
        for source, target in plan.copies:
            entries = self.cache[source * size : (source + 1) * size]
            self.cache[target * size : (target + 1) * size] = entries
        batch = Batch.build(plan.rows, size, torch.device("cpu"))
        for row in plan.rows:
            if row.request.id in self.fail:
                raise self.fail[row.request.id]
        self._write(batch)
        rows = self._logits(plan, batch)
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)

    def _write(self, batch: Batch) -> None:
        slots, tokens = batch.slot_mapping.tolist(), batch.token_ids.tolist()
        positions, starts = batch.positions.tolist(), batch.cu_seqlens_q.tolist()
        for row, (begin, end) in enumerate(pairwise(starts)):
            for index in range(begin, end):
                previous = self._read(batch, row, positions[index] - 1)
                self.cache[slots[index]] = entry(previous, tokens[index])

    def _read(self, batch: Batch, row: int, position: int) -> int:
        if position < 0:
            return 1
        size = self.geometry.block_size
        value = self.cache[batch.tables[row][position // size] * size + position % size]
        assert value != UNWRITTEN, "read before write"
        return value

    def _logits(self, plan: Plan, batch: Batch) -> list[np.ndarray]:
        result = []
        for index, row in enumerate(plan.rows):
            for stop in range(row.stop - row.num_logits, row.stop):
                values = logits_of([self._read(batch, index, p) for p in range(stop + 1)])
                result.append(values * np.nan if row.request.id in self.nan else values)
        return result


class SimPlugin:
    api_version = 1

    def __init__(self, runner: SimRunner) -> None:
        self.runner = runner

    @hookimpl
    def interlock_runner(self):
        return self.runner


def sim_engine(runner: SimRunner | None = None, plugins: dict | None = None, **engine) -> Engine:
    runner = runner or SimRunner()
    settings = Settings(engine=EngineSettings(**engine))
    return Engine(settings, plugins=Plugins.of({"sim": SimPlugin(runner), **(plugins or {})}))


def greedy(max_tokens: int = 8, **kw) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **kw)


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation, computed from scratch at every position."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_of(entries_of(tokens)).argmax()))
    return tokens[len(prompt) :]


def request(name: str, prompt: list[int], params: SamplingParams | None = None, **kw) -> Request:
    return Request(name, prompt, params or greedy(), **kw)


def run(engine: Engine, limit: int = 10_000, *, plugins: Any = ()) -> dict[str, list[Output]]:
    """Step until idle, checking memory after every step; ``plugins`` by name may hold some."""
    holders = dict(plugins).values()
    outputs: dict[str, list[Output]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check([p.held() for p in holders], [p.held_states() for p in holders])
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
