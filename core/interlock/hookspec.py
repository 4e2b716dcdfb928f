"""Every hook of interlock, in the order in which a process meets them.

A plugin is a class whose methods carry `hookimpl`; it is instantiated once per engine, so its
state is never shared, and once more wherever only its settings are read, so ``__init__`` should do
nothing but set attributes. It declares ``api_version`` (see `interlock.extension.API_VERSION`). An
implementation takes any subset of a hook's arguments by name and must not give them defaults,
since pluggy would then never fill them. Plugins are called in ``--plugins`` order.

*Cold* hooks run while an engine is built and may take their time. *Warm* hooks are frozen into a
tuple of functions when the engine starts: they run at most once per step over the whole batch,
must not block, and may not be wrappers. *Exclusive* hooks have one owner: two plugins that both
answer stop the start with both names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    import torch

    from interlock.engine.engine import Engine
    from interlock.engine.outputs import StepStats
    from interlock.engine.request import Request
    from interlock.extension import (
        ChunkLimit,
        Drafter,
        ExpertLayer,
        ExpertMethod,
        KVSource,
        LinearMethod,
        LogitsProcessor,
        Runner,
        StateExports,
    )
    from interlock.settings import Settings

PROJECT = "interlock"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

WARM = frozenset(
    {
        "interlock_poll",
        "interlock_kv_committed",
        "interlock_reclaim",
        "interlock_requests_finished",
        "interlock_requests_preempted",
        "interlock_step_done",
    }
)


# -- configuration (every process) -----------------------------------------------------------


@hookspec
def interlock_settings() -> type[Any]:
    """The plugin's settings class: frozen attrs, fields made with `interlock.settings.option`.

    Its values come from ``--set <plugin>.<field>=…`` or the table ``[<plugin>]`` of ``--config``.

    :returns: a class; the section is named after the plugin.

    **Called**: cold, in every process, once, before any other hook of the plugin.
    """
    raise NotImplementedError


@hookspec
def interlock_configure(settings: Settings, section: Any) -> None:
    """The settings are final. Refuse here, by ConfigError, what cannot be honoured.

    :param settings: the whole configuration, frozen.
    :param section: the plugin's own section, or None if it has none.

    **Called**: cold, in the engine process, once, before the model is loaded.
    """


@hookspec
def interlock_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add subcommands to the command line; set ``run`` to a function of the parsed arguments.

    :param subparsers: what `argparse.ArgumentParser.add_subparsers` returned.

    **Called**: cold, in the command-line process, only for plugins named by ``--plugins`` or
    ``INTERLOCK_PLUGINS``. **Must not** import torch.
    """


# -- model and kernels (engine process, every rank) ------------------------------------------


@hookspec
def interlock_models() -> Mapping[str, type[Any]]:
    """Model classes by architecture name, as ``config.json`` writes it.

    A class is built and used as `interlock.models.registry.build_model` says. If it has a static
    ``read_config(files)``, that reads the configuration; otherwise it is read as for Llama.

    :returns: a mapping; a name that the core or another plugin has too stops the start.

    **Called**: cold, once, before weights are opened.
    """
    raise NotImplementedError


@hookspec
def interlock_kernels(
    device: torch.device, dtype: torch.dtype
) -> Mapping[tuple[str, str], Callable[..., Any]]:
    """Implementations for the op table (`interlock.ops`), by ``(op, device type)``.

    :param device: where the model will run.
    :param dtype: of weights and activations.
    :returns: a mapping; an op that two plugins fill stops the start with both names.

    **Called**: cold, once, before the model is built.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def interlock_linear_method(
    name: str,
    in_features: int,
    out_features: int,
    weight_format: str,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearMethod | None:
    """How one linear layer stores and applies its weight. Exclusive per layer.

    :param name: of the layer, such as ``model.layers.0.mlp.gate_up_proj``.
    :param in_features: columns of the weight.
    :param out_features: rows of the weight, on this rank.
    :param weight_format: as stored in the checkpoint: ``BF16``, ``Q4_1`` and so on.
    :param dtype: of the activations.
    :param device: where the layer runs.
    :returns: a `interlock.extension.LinearMethod`, or None to leave the layer to the core.

    **Called**: cold, once per linear layer, while the model is built.
    """


@hookspec(firstresult=True)
def interlock_expert_method(layer: ExpertLayer) -> ExpertMethod | None:
    """How the routed experts of one layer store and apply their weights. Exclusive per layer.

    :param layer: sizes, activation, stored format, device, and whether its consumer takes results
        that are not finalized.
    :returns: a `interlock.extension.ExpertMethod`, or None to leave the layer to the core.

    **Called**: cold, once per layer with routed experts, when its weights are about to be loaded.
    """


@hookspec
def interlock_fingerprint(settings: Settings) -> str:
    """What the plugin does to the content of the cache, if anything.

    Cache entries are only ever shared between engines whose fingerprints are equal.

    :param settings: the whole configuration.
    :returns: any text; it is hashed together with model, weights, dtype and geometry.

    **Called**: cold, once, after the model is loaded.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def interlock_runner(settings: Settings) -> Runner | None:
    """Replace the model runner, by a simulator for example. Exclusive.

    :param settings: the whole configuration.
    :returns: a `interlock.extension.Runner`, or None.

    **Called**: cold, once, instead of loading weights.
    """


# -- scheduling, caching, sampling: objects handed over (engine process, rank 0) --------------


@hookspec
def interlock_kv_source(engine: Engine) -> KVSource | None:
    """A source of cache entries that need not be computed.

    Sources are asked in ``--plugins`` order, each with the tokens reached so far.

    :param engine: complete, but not yet stepping.
    :returns: a `interlock.extension.KVSource`, or None.

    **Called**: cold, once, after the model is loaded.
    """


@hookspec
def interlock_chunk_limit(engine: Engine) -> ChunkLimit | None:
    """A constraint on where the tokens of a row may end.

    :param engine: complete, but not yet stepping.
    :returns: a `interlock.extension.ChunkLimit`, or None; all limits apply, in order.

    **Called**: cold, once, after the model is loaded.
    """


@hookspec
def interlock_state_exports(engine: Engine) -> StateExports | None:
    """What has recurrent states inside a prefill row written to slots, in the same pass.

    Asked on models that have recurrent layers (``engine.runner.geometry.num_states`` > 0).

    :param engine: complete, but not yet stepping.
    :returns: a `interlock.extension.StateExports`, or None; all apply, in order.

    **Called**: cold, once, after the model is loaded.
    """


@hookspec(firstresult=True)
def interlock_drafter(engine: Engine) -> Drafter | None:
    """What proposes draft tokens. Exclusive.

    :param engine: complete, but not yet stepping.
    :returns: a `interlock.extension.Drafter`, or None.

    **Called**: cold, once, after the model is loaded.
    """


@hookspec
def interlock_logits_processor(engine: Engine) -> LogitsProcessor | None:
    """Something that changes logits before sampling.

    :param engine: complete, but not yet stepping.
    :returns: a `interlock.extension.LogitsProcessor`, or None; all apply, in order.

    **Called**: cold, once, after the model is loaded.
    """


@hookspec
def interlock_check_options(request: Request, options: Any) -> None:
    """A request brings options for this plugin. Refuse by RequestError what cannot be honoured.

    :param request: about to be queued; its other fields have been checked.
    :param options: what the request's ``plugins`` has under the plugin's name.

    **Called**: cold, once per request that has such options, when it is added.
    """


@hookspec
def interlock_counters(engine: Engine) -> Mapping[str, float]:
    """Counters that prove that the plugin runs, by name (``hits_total``, ``bytes``, …).

    :param engine: the running engine.
    :returns: numbers that only grow during an engine's life, except names that end in ``_now``.

    **Called**: whenever statistics are asked for, between steps; a server asks a few times per
    second. Shown by ``interlock plugins``, ``/metrics`` and every benchmark report.
    """
    raise NotImplementedError


# -- warm: once per step ----------------------------------------------------------------------


@hookspec
def interlock_poll(engine: Engine) -> None:
    """Move asynchronous work forward and release holds. Must not block.

    :param engine: between two steps.

    **Called**: warm, first in each step, also when no request can run.
    """


@hookspec
def interlock_kv_committed(engine: Engine, spans: Sequence[tuple[Request, int, int]]) -> None:
    """These tokens were accepted, and their cache entries will not be written again.

    :param engine: after acceptance, before the next plan.
    :param spans: ``(request, start, stop)`` in tokens; blocks are in ``request.block_table``.
        Everything before ``start`` is in the cache too, whoever supplied it.

    **Called**: warm, once per step that computed anything, before finished requests are freed.
    """


@hookspec
def interlock_reclaim(engine: Engine, num_blocks: int, num_states: int) -> None:
    """Memory is short: drop references that are not needed.

    :param engine: while a plan is being made.
    :param num_blocks: how many more free blocks are wanted, maybe none.
    :param num_states: how many more free slots for recurrent states, likewise.

    **Called**: warm, when an allocation would fail, before anyone is preempted.
    """


@hookspec
def interlock_requests_finished(engine: Engine, requests: Sequence[Request]) -> None:
    """These requests have ended, for any reason; their references are dropped after this call.

    :param engine: between two steps, or after commit.
    :param requests: each exactly once, whatever ended it.

    **Called**: warm, at most twice per step: before planning for those that were aborted or ran
    out of time, and after `interlock_kv_committed` for those that ended in this step.
    """


@hookspec
def interlock_requests_preempted(engine: Engine, requests: Sequence[Request]) -> None:
    """These requests have lost their memory and wait to be admitted, and settled, again.

    Their block tables are empty already; a plugin that still writes to their blocks has its own
    references on them.

    :param engine: after a plan is made, before its forward pass.
    :param requests: in the order in which they were preempted.

    **Called**: warm, at most once per step.
    """


@hookspec
def interlock_step_done(engine: Engine, stats: StepStats) -> None:
    """A step is complete.

    :param engine: between two steps.
    :param stats: what the step did and how long its parts took.

    **Called**: warm, last in each step that computed anything.
    """


@hookspec
def interlock_close(engine: Engine) -> None:
    """The engine ends: stop threads, close sockets and files, drop references.

    :param engine: idle; all its requests have ended.

    **Called**: cold, once, by `Engine.close`; an exception is logged and keeps nobody else from
    closing.
    """


# -- the HTTP process -------------------------------------------------------------------------


@hookspec
def interlock_routes(app: Any) -> None:
    """Add routes to the HTTP application, behind its key check and body limits.

    :param app: the `sanic.Sanic` application.

    **Called**: cold, in every HTTP process, once, before it listens. **Must not** import torch.
    """
