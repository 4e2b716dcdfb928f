"""Runs prompts through engines that differ in everything but the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from interlock.engine.engine import Engine
from interlock.engine.request import Request, SamplingParams
from interlock.plugins import Plugins
from interlock.settings import EngineSettings, Settings

COUNT = 24


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def engine(model: str, plugins: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    given = {"dtype": "float64", "max_model_len": 512, "num_blocks": 800, "threads": 1, **settings}
    return Engine(
        Settings(engine=EngineSettings(model=model, **given)), plugins=Plugins.of(plugins or {})
    )


def run(built: Engine, prompts: Sequence[Sequence[int]], count: int = COUNT) -> list[list[int]]:
    """All prompts at once; every output token, in order."""
    for index, prompt in enumerate(prompts):
        built.add(Request(f"p{index}", list(prompt), greedy(count)))
    return drain(built, len(prompts))


def drain(built: Engine, count: int) -> list[list[int]]:
    tokens: dict[str, list[int]] = {f"p{index}": [] for index in range(count)}
    while built.has_work():
        for output in built.step():
            assert output.finish_reason != "error", output.error
            if output.request_id in tokens:
                tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def solo(model: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    built = engine(model, max_num_seqs=1, max_num_batched_tokens=512)
    return [run(built, [prompt])[0] for prompt in prompts]


@attrs.frozen
class Player:
    """Plays prompts on a new engine of one model."""

    model: str

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        plugins: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[list[list[int]], Engine]:
        built = engine(self.model, plugins, **settings)
        tokens = run(built, prompts)
        built.scheduler.check(
            [p.held() for p in (plugins or {}).values()],
            [p.held_states() for p in (plugins or {}).values()],
        )
        return tokens, built
