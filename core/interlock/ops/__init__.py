"""The op table: every kernel that a model's forward pass calls, replaceable one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from interlock.errors import PluginError
from interlock.ops import experts, torch_ops

if TYPE_CHECKING:
    from interlock.parallel.group import TensorParallel

OPS = tuple(torch_ops.OPS)


@attrs.define(slots=True, eq=False)
class OpTable:
    """The implementations in use.

    Shapes and meanings are those of `interlock.ops.reference`, and of `interlock.ops.kda`,
    `.latent` and `.experts` for the ops of hybrid models.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rope_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]
    causal_conv: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    kda_gate: Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
    kda_recurrent: Callable[..., tuple[Tensor, list[Tensor]]]
    kda_chunk: Callable[..., tuple[Tensor, Tensor, list[Tensor]]]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    residual_mix: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    latent_store: Callable[[Tensor, Tensor, Tensor], None]
    mla_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Any, float], Tensor]
    situ_mul: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    run_experts: Callable[..., Tensor]
    finalize_experts: Callable[[Tensor, Tensor, Tensor], Tensor]
    latent_tail: Callable[[Tensor, Tensor, Tensor, Tensor, float, TensorParallel], Tensor]
    linear_add: Callable[[Tensor, Tensor, Tensor], Tensor]
    choices: dict[str, str]
    """Which implementation of each op runs, and why."""
    dtype: torch.dtype

    def prepare(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Compile what depends on a model's shape, so that the first step needn't."""
        prepare = getattr(self.attention, "prepare", None)
        if prepare is not None:
            prepare(self.dtype, heads, kv_heads, head_dim)


def build(
    device: torch.device,
    dtype: torch.dtype,
    overrides: Mapping[tuple[str, str], Callable[..., Any]],
) -> OpTable:
    """Choose an implementation of every op for ``device`` and ``dtype``.

    ``overrides`` has plugins' implementations by (op, device type) and wins; an unknown op in it
    is a `PluginError`. On a CPU numba kernels are used where they can be, else torch.
    """
    ours, how = _core(device, dtype)
    ops = {**torch_ops.OPS, **ours}
    choices = {name: how if name in ours else "torch: no other kernel yet" for name in OPS}
    for (op, kind), function in overrides.items():
        if op not in OPS:
            raise PluginError(f"a plugin has a kernel for {op!r}; ops are {', '.join(OPS)}")
        if kind == device.type:
            ops[op] = function
            choices[op] = f"plugin ({getattr(function, '__module__', type(function).__module__)})"
    if ops["latent_tail"] is experts.latent_tail:
        # The norm behind an eager sum: both ways then give the same bits.
        ops["latent_tail"] = functools.partial(experts.latent_tail, rms_norm=ops["rms_norm"])
    return OpTable(**ops, choices=choices, dtype=dtype)


def _core(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    if device.type != "cpu":
        return dict(torch_ops.OPS), f"torch: the device is {device.type}"
    problem = kernel_problem(dtype)
    if problem is not None:
        return dict(torch_ops.OPS), f"torch: {problem}"
    from interlock.ops import cpu_ops

    return cpu_ops.build(dtype)


def kernel_problem(dtype: torch.dtype) -> str | None:
    """Why the CPU kernels can't run for ``dtype`` on this machine, or None."""
    try:
        from interlock.ops import cpu_ops
    except (ImportError, OSError) as error:
        return f"numba can't be used ({error})"
    return cpu_ops.unusable(dtype)
