"""A workload for plugins that do not know each other, played and checked against solo runs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import attrs

from interlock.engine.request import SamplingParams
from plugins_for_tests import Base
from sim import SimRunner, expected_tokens, greedy, request, sim_engine, tokens_of

BLOCK = 4

known_tokens = functools.lru_cache(maxsize=None)(
    lambda prompt, count: tuple(expected_tokens(list(prompt), count))
)


@attrs.frozen
class Job:
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int
    aborts: int | None
    priority: int


def workload(seed: int, count: int = 12, most: int = 5) -> list[Job]:
    """Prompts of at most ``most`` blocks out of a few, so that they repeat under other parents."""
    rng = random.Random(seed)
    parts = [tuple(rng.randrange(64) for _ in range(BLOCK)) for _ in range(3)]
    jobs: list[Job] = []
    for i in range(count):
        if jobs and rng.random() < 0.4:
            prompt = rng.choice(jobs).prompt
        else:
            blocks = [rng.choice(parts) for _ in range(rng.randint(1, most))]
            tail = tuple(rng.randrange(64) for _ in range(rng.choice([0, 0, 1, 3])))
            prompt = tuple(itertools.chain(*blocks)) + tail
        arrives = rng.randrange(60)
        aborts = arrives + rng.randrange(12) if rng.random() < 0.25 else None
        tokens = rng.choice([1, 4, 7, 12])
        jobs.append(Job(f"r{i}", prompt, tokens, arrives, aborts, rng.choice([0, 0, 1])))
        if aborts is not None:
            jobs.append(Job(f"r{i}-retry", prompt, tokens, aborts + 1, None, 0))
    return jobs


def play(
    plugins: dict[str, Base],
    runner: SimRunner,
    seed: int,
    make_params: Callable[[int], SamplingParams] = greedy,
    most: int = 5,
    **engine_settings,
) -> dict[str, list]:
    """Run a workload, checking memory after every step, and then every greedy token."""
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 13, **engine_settings}
    engine = sim_engine(runner, plugins, **options)
    jobs, outputs = workload(seed, most=most), {}
    for step in range(2000):
        for job in jobs:
            if job.arrives == step:
                params = make_params(job.max_tokens)
                engine.add(request(job.name, list(job.prompt), params, priority=job.priority))
            if job.aborts == step:
                engine.abort(job.name)
        if step > 75 and not engine.has_work():
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        held = [plugin.held() for plugin in plugins.values()]
        engine.scheduler.check(held, [plugin.held_states() for plugin in plugins.values()])
    assert not engine.has_work(), "the engine does not come to an end"
    for _ in range(5):
        engine.step()
    if make_params is greedy:
        verify(jobs, outputs)
    settled = [p.counts["settled_total"] for p in plugins.values() if hasattr(p, "settle")]
    assert len(set(settled)) <= 1, "one settle per admission for every source"
    check_nothing_is_left(engine, plugins)
    return outputs


def verify(jobs: Sequence[Job], outputs: dict[str, list]) -> None:
    for job in jobs:
        given, wanted = outputs[job.name], known_tokens(job.prompt, job.max_tokens)
        got, reason = tuple(tokens_of(given)), given[-1].finish_reason
        assert [o.finish_reason is not None for o in given].count(True) == 1
        if reason == "abort":
            assert job.aborts is not None
            assert got == wanted[: len(got)]
        else:
            assert (reason, given[-1].error) == ("length", None)
            assert got == wanted


def check_nothing_is_left(engine, plugins: dict[str, Base]) -> None:
    memory = engine.scheduler.memory
    blocks = [block for plugin in plugins.values() for block in plugin.held()]
    states = [slot for plugin in plugins.values() for slot in plugin.held_states()]
    assert memory.pool.num_blocks - memory.pool.num_free == len(set(blocks))
    assert memory.states.num_blocks - memory.states.num_free == len(set(states))
    engine.hooks.reclaim(memory.pool.num_blocks, memory.states.num_blocks)
    assert memory.pool.usage == memory.states.usage == 0
