"""transformers' ``generate`` on the same weights: static batches, greedy, timed per step."""

from __future__ import annotations

import time
from typing import Any

from interlock.bench.metrics import Trace
from interlock.bench.spec import Load, Target, with_plugins
from interlock.errors import InterlockError
from interlock.settings import EngineSettings, load_settings
from interlock.weights.resolve import ModelFiles, resolve


class TransformersRunner:
    """Same interface as `worker.EngineRunner`; ``concurrency`` is the size of a static batch."""

    def __init__(self, target: Target) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise InterlockError(
                f"the transformers target needs transformers: {error}; install it with "
                "pip install 'interlock[oracle]'"
            ) from None
        settings = load_settings((), None, with_plugins(target, ()).flags, target.sets).engine
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._torch = torch
        self._version = transformers.__version__
        self._files = resolve(settings.model)
        self._dtype = _dtype_name(settings)
        model = _load(transformers, self._files, getattr(torch, self._dtype))
        self._model = model.eval()

    def info(self) -> dict[str, Any]:
        return {
            "model_name": self._files.name,
            "dtype": self._dtype,
            "threads": self._torch.get_num_threads(),
            "versions": {"transformers": self._version, "torch": str(self._torch.__version__)},
        }

    def counters(self) -> dict[str, dict[str, float]]:
        return {}

    def totals(self) -> dict[str, float]:
        return {}

    def run(self, load: Load, prompts: list[list[int]]) -> list[Trace]:
        size = load.concurrency
        groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [trace for group in groups for trace in self._batch(load, group)]

    def _batch(self, load: Load, prompts: list[list[int]]) -> list[Trace]:
        torch = self._torch
        ids = torch.tensor(prompts, dtype=torch.int64, device=self._model.device)
        steps: list[float] = []
        start = time.monotonic()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=[self._stopwatch(steps)],
                **_generation(load),
            )
        arrivals = [(at, 1.0) for at in steps]
        return [Trace(start, list(arrivals), steps[-1], len(prompt)) for prompt in prompts]

    def _stopwatch(self, steps: list[float]) -> Any:
        """A stopping criterion that never stops: it is called once for every new token."""

        def note(input_ids: Any, _scores: Any, **_: Any) -> Any:
            steps.append(time.monotonic())
            return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool)

        return note


def _generation(load: Load) -> dict[str, Any]:
    if not load.ignore_eos:
        raise InterlockError("the transformers target needs --ignore-eos: its batches are static")
    lengths = {"max_new_tokens": load.output_tokens, "min_new_tokens": load.output_tokens}
    sampling = {"do_sample": True, "temperature": load.temperature} if load.temperature else {}
    return {"do_sample": False, **lengths, **sampling}


def _dtype_name(settings: EngineSettings) -> str:
    """The dtype that interlock itself would take, so that both compute with the same one."""
    from interlock.engine.runner import pick_device, pick_dtype

    dtype, _ = pick_dtype(settings.dtype, pick_device(settings.device))
    return str(dtype).removeprefix("torch.")


def _load(transformers: Any, files: ModelFiles, dtype: Any) -> Any:
    transformers.utils.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    if files.kind == "gguf":
        options = {"gguf_file": files.path.name, **_dense(transformers)}
        return auto.from_pretrained(files.path.parent, dtype=dtype, **options)
    return auto.from_pretrained(files.path, dtype=dtype)


def _dense(transformers: Any) -> dict[str, Any]:
    """Newer releases can keep GGUF weights packed, which is slower here than dense ones."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
