"""500 mixed requests at concurrency 32 with random cancels, over HTTP and in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator

import httpx
import psutil
import pytest

from interlock.api import LLM
from interlock.engine.request import Request, SamplingParams
from server.harness import ServerProcess, eventually, gauge, serving
from tinymodels import write_tiny_hf

REQUESTS = int(os.environ.get("INTERLOCK_SOAK_REQUESTS", "500"))
CONCURRENCY = 32
# Allocators keep some pages; a leak of one block table or stream per request would be far more.
MAX_GROWTH = 48 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ServerProcess]:
    with serving(
        folder, real=True, engine__num_blocks=60, engine__max_num_seqs=24, engine__threads=1
    ) as server:
        yield server


def body(rng: random.Random) -> dict:
    """A request of a random shape; about 60 blocks for up to 24 of them, so many are preempted."""
    length = rng.randint(1, 90)
    return {
        "prompt": [rng.randrange(3, 250) for _ in range(length)],
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.6,
        **({"logprobs": 2} if rng.random() < 0.2 else {}),
        **({"stop": ["e"]} if rng.random() < 0.2 else {}),
        **({"top_p": 0.8, "seed": 5} if rng.random() < 0.3 else {}),
    }


async def one(http: httpx.AsyncClient, rng: random.Random) -> str:
    """Send a request, perhaps leave it early; returns how it ended."""
    given = body(rng)
    leaves = rng.random() < 0.3
    if not given["stream"]:
        if leaves:
            # It may be complete before we leave, which is fine too.
            with contextlib.suppress(httpx.TimeoutException):
                await http.post("/v1/completions", json=given | {"max_tokens": 400}, timeout=0.02)
            return "left"
        answer = await http.post("/v1/completions", json=given)
        return "complete" if _complete(answer.json(), given) else f"odd: {answer.text}"
    async with http.stream("POST", "/v1/completions", json=given) as answer:
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if leaves and len(lines) > rng.randint(0, 6):
                return "left"
    return "complete" if "data: [DONE]" in lines else f"odd: {lines[-3:]}"


def _complete(answer: dict, given: dict) -> bool:
    reasons = [choice["finish_reason"] for choice in answer.get("choices", [])]
    return len(reasons) == given["n"] and set(reasons) <= {"stop", "length"}


async def load(url: str, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)

    async def guarded(own: random.Random) -> str:
        async with gate:
            return await one(http, own)

    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        return await asyncio.gather(*(guarded(random.Random(rng.random())) for _ in range(count)))


def test_every_uncancelled_request_completes_and_nothing_leaks(server):
    engine = server.engine()
    first = asyncio.run(load(server.url, REQUESTS // 2, seed=1))
    before = engine.memory_info().rss
    second = asyncio.run(load(server.url, REQUESTS // 2, seed=2))
    ends = [*first, *second]
    assert set(ends) == {"complete", "left"}
    assert ends.count("complete") > REQUESTS / 2
    with httpx.Client(base_url=server.url) as http:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            eventually(lambda name=name: gauge(http, f"interlock_{name}") == 0)
    assert engine.memory_info().rss - before < MAX_GROWTH


def test_the_same_in_one_process_keeps_the_pool_sound_after_every_step(folder):
    rng = random.Random(7)
    llm = LLM(folder, num_blocks=60, max_num_seqs=24, dtype="float32")
    engine, ended, cancelled = llm.engine, set(), set()
    process, sizes = psutil.Process(), []
    waiting = list(range(REQUESTS))
    while waiting or engine.has_work():
        while waiting and len(engine.scheduler.requests) < CONCURRENCY:
            given = body(rng)
            params = SamplingParams(
                max_tokens=given["max_tokens"], temperature=given["temperature"], ignore_eos=True
            )
            engine.add(Request(f"r{waiting.pop()}", given["prompt"], params))
        if rng.random() < 0.15:
            name = rng.choice(list(engine.scheduler.requests))
            cancelled.add(name)
            engine.abort(name)
        ended |= {o.request_id: o for o in engine.step() if o.finish_reason}.keys()
        engine.scheduler.check()
        sizes.append(process.memory_info().rss)
    assert len(ended) == REQUESTS
    assert engine.stats().preemptions_total > 0
    assert cancelled
    assert engine.scheduler.memory.pool.usage == 0
    assert sizes[-1] - sizes[len(sizes) // 2] < MAX_GROWTH
