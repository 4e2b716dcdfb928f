"""Putting an engine together: its runner, what plugins hand over, and what it says about itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from interlock.engine.outputs import EngineInfo
from interlock.errors import ConfigError, PluginError
from interlock.extension import (
    ChunkLimit,
    Drafter,
    KVSource,
    LogitsProcessor,
    Runner,
    StateExports,
    check,
    noted,
)
from interlock.parallel.group import SINGLE
from interlock.plugins import Plugins
from interlock.settings import Settings

if TYPE_CHECKING:
    from interlock.engine.engine import Engine
    from interlock.engine.runner import ModelRunner, Progress
    from interlock.tokenizer import Tokenizer


def runner(
    settings: Settings, plugins: Plugins, progress: Progress | None
) -> tuple[Runner, Tokenizer | None]:
    """A plugin's runner, which needs no tokenizer, or the model's runner with its tokenizer."""
    answer = plugins.exclusive("interlock_runner", settings=settings)
    if answer is not None:
        if settings.engine.tp > 1:
            raise ConfigError(
                f"engine.tp: plugin {answer[0]!r} replaces the runner, which knows no other ranks; "
                "use --tp 1"
            )
        return check(answer[1], Runner, answer[0]), getattr(answer[1], "tokenizer", None)
    from interlock.engine.runner import ModelRunner
    from interlock.tokenizer import Tokenizer

    outer, size = os.environ.get("TORCHELASTIC_RUN_ID"), settings.engine.tp
    if outer is None and size == 1:
        built = ModelRunner(settings, plugins, progress)
    else:
        built = _parallel(settings, plugins, progress)
    return built, Tokenizer.load(built.files)


def _parallel(settings: Settings, plugins: Plugins, progress: Progress | None) -> ModelRunner:
    """A runner whose model is spread over several processes; nothing is left if that fails."""
    from interlock.engine.runner import ModelRunner
    from interlock.parallel import launch

    size = launch.wanted(settings)
    if size > 1 and plugins.in_process:
        raise ConfigError(
            "engine.tp: other ranks load plugins by name, and cannot have "
            f"{', '.join(plugins.in_process)}, which exists in this process alone"
        )
    if size == 1:
        return ModelRunner(settings, plugins, progress)
    _check_heads(settings, plugins, size)
    ranks = launch.Ranks(settings, size)
    local = size if ranks.local else int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        built: ModelRunner = ranks.loaded(
            lambda: ModelRunner(
                settings, plugins, progress, tp=ranks.tp, local_ranks=local, ranks=ranks
            )
        )
        return built
    except BaseException:
        ranks.close()
        raise


def _check_heads(settings: Settings, plugins: Plugins, size: int) -> None:
    """Refuse what cannot be shared before a process is started for it."""
    from interlock.weights.config import load_config
    from interlock.weights.resolve import resolve

    config = load_config(resolve(settings.engine.model), plugins.merged("interlock_models"))
    check_tp = getattr(config, "check_tp", None)
    if check_tp is not None:
        check_tp(size)


def connect(engine: Engine) -> None:
    """Ask plugins for the objects that scheduler and sampler will call."""
    scheduler = engine.scheduler
    scheduler.sources = _objects(engine, "interlock_kv_source", KVSource)
    scheduler.exports = _objects(engine, "interlock_state_exports", StateExports)
    scheduler.limits = _objects(engine, "interlock_chunk_limit", ChunkLimit)
    engine.sampler.processors = _objects(engine, "interlock_logits_processor", LogitsProcessor)
    drafter = engine.plugins.exclusive("interlock_drafter", engine=engine)
    if drafter is not None:
        name, thing = drafter
        scheduler.drafter = noted(check(thing, Drafter, name), Drafter, name)


def _objects(engine: Engine, hook: str, protocol: type[Any]) -> list[tuple[str, Any]]:
    answers = engine.plugins.each(hook, engine=engine)
    if protocol is KVSource and engine.runner.geometry.num_states:
        _check_sources(answers)
    return [(name, noted(check(thing, protocol, name), protocol, name)) for name, thing in answers]


def _check_sources(sources: Sequence[tuple[str, Any]]) -> None:
    for name, source in sources:
        if not getattr(source, "supplies_states", False):
            raise PluginError(
                f"plugin {name!r} supplies blocks but no recurrent states, which this model's "
                "layers continue from; leave it out of --plugins, or install a release that does"
            )


def describe(engine: Engine, seconds: float) -> EngineInfo:
    """An `EngineInfo`; its fingerprint says what cache entries of this engine depend on."""
    settings, tokenizer = engine.settings, engine.tokenizer
    runner: Any = engine.runner
    geometry = runner.geometry
    answers = engine.plugins.each("interlock_fingerprint", settings=settings)
    plugin_parts = [f"{plugin}={text}" for plugin, text in answers]
    size = getattr(runner, "tp", SINGLE).size
    files, config = getattr(runner, "files", None), getattr(runner, "config", None)
    dtype = str(getattr(runner, "dtype", "none")).removeprefix("torch.")
    name = files.name if files else type(runner).__name__
    parts = [name, files.revision if files else "", dtype, str(geometry.block_size), f"tp={size}"]
    digest = xxhash.xxh3_128_hexdigest("\x00".join([*parts, *plugin_parts]).encode())
    table = getattr(runner, "ops", None)
    return EngineInfo(
        model_name=settings.engine.served_model_name or name,
        architecture=config.architecture if config else type(runner).__name__,
        max_model_len=min(geometry.max_model_len, geometry.num_blocks * geometry.block_size),
        vocab_size=geometry.vocab_size,
        dtype=dtype,
        device=str(getattr(runner, "device", "none")),
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        fingerprint=digest,
        tp=size,
        num_states=geometry.num_states,
        state_bytes_per_slot=getattr(runner, "state_bytes_per_slot", 0),
        eos_token_ids=sorted(tokenizer.eos_token_ids) if tokenizer else [],
        num_parameters=getattr(runner, "num_parameters", 0),
        weight_bytes=getattr(runner, "weight_bytes", 0),
        kv_bytes_per_token=getattr(runner, "kv_bytes_per_token", 0),
        load_seconds={**getattr(runner, "load_seconds", {}), "total": seconds},
        ops=dict(table.choices) if table else {},
    )
