"""Which class runs which architecture, and how a model is built and loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from interlock.errors import PluginError, WeightsError
from interlock.models.kimi_k3 import KimiModel
from interlock.models.llama import LlamaModel
from interlock.ops import OpTable
from interlock.parallel.group import SINGLE, TensorParallel
from interlock.weights.source import open_weights

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles

MODELS: Final[Mapping[str, type[Any]]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
    "KimiK3ForConditionalGeneration": KimiModel,
    "KimiLinearForCausalLM": KimiModel,
}


def merged_models(extra: Mapping[str, type[Any]]) -> dict[str, type[Any]]:
    """The core's models and those of plugins; a name that both have is a `PluginError`."""
    both = sorted(MODELS.keys() & extra.keys())
    if both:
        raise PluginError(f"a plugin's model {both[0]!r} has the name of one of the core's models")
    return {**MODELS, **extra}


def build_model(
    files: ModelFiles,
    config: Any,
    *,
    ops: OpTable,
    linear_method: Callable[..., Any],
    expert_method: Callable[[Any], Any] | None = None,
    extra_models: Mapping[str, type[Any]],
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool | None = None,
    tp: TensorParallel = SINGLE,
    progress: Callable[[str, float], None] | None = None,
) -> Any:
    """Build the model that ``config`` describes and load its weights.

    Everything that can be wrong with the files is found before the first weight is read; errors
    are `WeightsError`.
    """
    models = merged_models(extra_models)
    if config.architecture not in models:
        raise WeightsError(
            f"{files.path}: architecture {config.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(models))}"
        )
    options: dict[str, Any] = {"tp": tp} if tp.size > 1 else {}
    kind = models[config.architecture]
    if expert_method is not None and "expert_method" in inspect.signature(kind).parameters:
        options["expert_method"] = expert_method
    model = kind(
        config,
        ops,
        linear_method,
        dtype,
        device,
        batch_invariant=batch_invariant,
        **options,
    )
    with open_weights(files, config) as source:
        model.load(source, progress)
    return model
