"""Runs the model over a plan: device, dtype, cache size, one forward call per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from interlock import ops
from interlock.cache.blocks import blocks_for
from interlock.engine.batch import Batch, Plan, order_key
from interlock.errors import ConfigError
from interlock.extension import Geometry, check
from interlock.parallel.group import SINGLE, TensorParallel
from interlock.plugins import Plugins
from interlock.settings import EngineSettings, Settings
from interlock.weights.memory import return_freed

if TYPE_CHECKING:
    from interlock.parallel.launch import Ranks

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

# On a CPU the cache shares memory with everything else, so it takes a part of what is free.
CPU_CACHE_SHARE = 0.25
CUDA_CACHE_SHARE = 0.85
MAX_CPU_CACHE_BYTES = 4 * 2**30


class ModelRunner:
    """A loaded model with its caches. Satisfies `interlock.extension.Runner`."""

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        progress: Progress | None = None,
        *,
        tp: TensorParallel = SINGLE,
        local_ranks: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        """``ranks`` are the workers that compute along, on rank 0 only."""
        engine = settings.engine
        self.tp, self.ranks, self.local_ranks = tp, ranks, local_ranks
        self.load_seconds: dict[str, float] = {}
        threads = engine.threads
        if threads is None and local_ranks > 1:
            threads = max(1, torch.get_num_threads() // local_ranks)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = _device_of_rank(pick_device(engine.device), tp, local_ranks)
        self.dtype, self.dtype_reason = pick_dtype(engine.dtype, self.device)
        self.model = self._load(settings, plugins, progress)
        return_freed()
        self.block_size = engine.block_size
        if progress is not None:
            progress("allocating the KV cache", 1.0)
        self.geometry = self._allocate(engine)

    def _load(self, settings: Settings, plugins: Plugins, progress: Progress | None) -> Any:
        from interlock.models.registry import build_model
        from interlock.weights.config import load_config
        from interlock.weights.resolve import resolve

        started = time.monotonic()
        self.files = resolve(settings.engine.model)
        models = plugins.merged("interlock_models")
        self.config = load_config(self.files, models)
        overrides = plugins.merged("interlock_kernels", device=self.device, dtype=self.dtype)
        if progress is not None:
            progress("preparing kernels (the first start compiles them)", 0.0)
        self.ops = ops.build(self.device, self.dtype, overrides)
        self.load_seconds["prepare"] = time.monotonic() - started
        started = time.monotonic()
        model = build_model(
            self.files,
            self.config,
            ops=self.ops,
            linear_method=_linear_methods(plugins),
            expert_method=_expert_methods(plugins),
            extra_models=models,
            dtype=self.dtype,
            device=self.device,
            batch_invariant=settings.engine.batch_invariant,
            tp=self.tp,
            progress=progress,
        )
        self.load_seconds["weights"] = time.monotonic() - started
        return model

    def _allocate(self, engine: EngineSettings) -> Geometry:
        max_model_len = _max_model_len(engine, self.config.max_position_embeddings)
        num_states = self._num_states(engine)
        num_blocks = engine.num_blocks or self._num_blocks(engine, max_model_len, num_states)
        num_blocks = self.tp.least(num_blocks)
        options = (num_states,) if num_states else ()
        self.model.allocate_caches(num_blocks, engine.block_size, *options)
        vocab_size = self.config.vocab_size
        return Geometry(num_blocks, engine.block_size, max_model_len, vocab_size, num_states)

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of one sequence's recurrent states on this rank; 0 for a model without any."""
        count = getattr(self.model, "state_bytes_per_slot", None)
        return int(count()) if count else 0

    def _num_states(self, engine: EngineSettings) -> int:
        if self.state_bytes_per_slot:
            return engine.num_states or engine.max_num_seqs
        if engine.num_states:
            raise ConfigError("engine.num_states: this model has no recurrent layers; leave it out")
        return 0

    def _num_blocks(self, engine: EngineSettings, max_model_len: int, num_states: int) -> int:
        """As many blocks as the budget holds, at most what all sequences together could use."""
        block_bytes = self.model.cache_bytes_per_block(engine.block_size)
        wanted = engine.max_num_seqs * blocks_for(max_model_len, engine.block_size)
        whole = (engine.kv_cache_bytes or _cache_budget(self.device)) // self.local_ranks
        budget = whole - num_states * self.state_bytes_per_slot
        count = int(min(wanted, budget // block_bytes))
        if count < 1:
            raise ConfigError(
                f"engine.kv_cache_bytes: of {whole} bytes {max(0, budget)} are left beside "
                f"{num_states} recurrent states, which hold no block of {block_bytes} bytes; "
                "give more, or a smaller engine.block_size or engine.num_states"
            )
        return count

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Logits [S, V] of the positions that the rows ask for, in row order."""
        if self.ranks is None:
            return self._forward(plan)
        self.ranks.step(plan, self.model.tap_layers)
        logits: Tensor = self.ranks.guarded(lambda: self._forward(plan))
        return logits

    def _forward(self, plan: Plan) -> Tensor:
        if plan.copies:
            self.model.copy_blocks(plan.copies)
        if plan.state_copies:
            self.model.copy_states(plan.state_copies)
        if plan.clears:
            self.model.clear_states(plan.clears)
        batch = Batch.build(plan.rows, self.block_size, self.device)
        hidden = self.model.forward(batch)
        logits: Tensor = self.model.logits(hidden)
        return logits

    def settle(self, plan: Plan, kept: Sequence[int]) -> None:
        """Verify rows continue from the state after ``kept[i]`` of row i's tokens."""
        pairs = zip(plan.rows, kept, strict=True)
        counts = [count for row, count in pairs if order_key(row) == 0]
        if self.ranks is not None:
            self.ranks.settle(counts)
        self.settle_rows(counts)

    @torch.inference_mode()
    def settle_rows(self, kept: Sequence[int]) -> None:
        """The same, for the verify rows of the last step alone."""
        self.model.settle_states(kept)

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    @property
    def num_parameters(self) -> int:
        return int(self.model.num_parameters)

    @property
    def weight_bytes(self) -> int:
        return int(self.model.weight_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        return int(self.model.cache_bytes_per_block(self.block_size)) // self.block_size


def _linear_methods(plugins: Plugins) -> Callable[..., Any]:
    """The exclusive hook as a function of a layer's description; checks what it returns."""
    from interlock.extension import LinearMethod

    if not plugins.implementations("interlock_linear_method"):
        return lambda **_: None

    def choose(**layer: Any) -> Any:
        answer = plugins.exclusive("interlock_linear_method", **layer)
        return check(answer[1], LinearMethod, answer[0]) if answer else None

    return choose


def _expert_methods(plugins: Plugins) -> Callable[[Any], Any] | None:
    from interlock.extension import ExpertMethod

    if not plugins.implementations("interlock_expert_method"):
        return None

    def choose(layer: Any) -> Any:
        answer = plugins.exclusive("interlock_expert_method", layer=layer)
        return check(answer[1], ExpertMethod, answer[0]) if answer else None

    return choose


def pick_device(name: str) -> torch.device:
    """The device of that name; raises ConfigError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: no device {name!r}; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: this torch finds no CUDA device; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {device.type} is not supported; use cpu, cuda or cuda:N")
    return device


def _device_of_rank(device: torch.device, tp: TensorParallel, local_ranks: int) -> torch.device:
    """Each rank of a machine has a GPU of its own."""
    if device.type != "cuda" or tp.size == 1:
        return device
    if torch.cuda.device_count() < local_ranks:
        raise ConfigError(
            f"engine.tp: {local_ranks} ranks on this machine need as many GPUs, and torch finds "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(tp.rank % local_ranks)
    return torch.device("cuda", tp.rank % local_ranks)


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype for weights and activations, and why."""
    if name != "auto":
        return getattr(torch, name), "asked for"
    if device.type == "cuda":
        return torch.bfloat16, "CUDA default"
    from interlock.ops.cpu_probe import pick_dtype as probe

    dtype, reason, _ = probe()
    return dtype, reason


def _max_model_len(engine: EngineSettings, trained: int) -> int:
    if engine.max_model_len is None:
        return trained
    if engine.max_model_len > trained:
        raise ConfigError(
            f"engine.max_model_len: the model was made for {trained} tokens, "
            f"not {engine.max_model_len}"
        )
    return engine.max_model_len


def _cache_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_CACHE_SHARE)
    available = psutil.virtual_memory().available
    return min(int(available * CPU_CACHE_SHARE), MAX_CPU_CACHE_BYTES)
