"""Mixture of experts, with routed experts in a narrower latent space if the model has one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from interlock.extension import ExpertLayer, ExpertMethod, UnfinalizedExperts
from interlock.layers.linear import Dense, FixedRows
from interlock.layers.mlp import GROUP, MLP
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Projection, Shapes, widened
from interlock.ops import OpTable
from interlock.ops.reference import wide
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.source import WeightSource, WeightTensor


def gated_mlp(name: str, config: KimiConfig, inner: int, build: Build) -> MLP:
    """``down(act(gate x, up x))`` with SiTU or SwiGLU, for dense layers and shared experts."""
    activation = None
    if config.hidden_act == "situ":
        activation = functools.partial(
            build.ops.situ_mul, beta=config.situ_beta, linear_beta=config.situ_linear_beta
        )
    return MLP(name, config.hidden_size, inner, build, activation=activation)


class DenseExperts:
    """All routed experts of a layer as dense weights; packed ones are dequantized when loaded."""

    def __init__(self, layer: ExpertLayer, ops: OpTable) -> None:
        self._layer, self._ops = layer, ops

    def load(self, matrix: Callable[[int, str], WeightTensor]) -> None:
        layer = self._layer
        empty = functools.partial(torch.empty, dtype=layer.dtype, device=layer.device)
        count, inner = layer.num_experts, layer.inner
        self._w13 = empty((count, 2 * inner, layer.size))
        self._w2 = empty((count, layer.size, inner))
        for expert in range(count):
            self._w13[expert, :inner] = matrix(expert, "w1").dense(layer.dtype)
            self._w13[expert, inner:] = matrix(expert, "w3").dense(layer.dtype)
            self._w2[expert] = matrix(expert, "w2").dense(layer.dtype)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """X [T, D], weights and ids [T, top] to this rank's part of the sum, wide [T, D]."""
        beta, linear_beta = (*self._layer.activation[1:], None, None)[:2]
        block = FixedRows.ROWS if self._layer.batch_invariant else None
        return self._ops.run_experts(x, self._w13, self._w2, weights, ids, beta, linear_beta, block)


class Experts:
    """The routed experts of a layer: their tensors, this rank's share, and what runs them.

    A rank holds a share of every expert's inner dimension, in groups of 32, so that packed weights
    are never cut inside a scale; its result is a part of the sum over the ranks.
    """

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        self._share = build.tp.share(config.moe_intermediate_size, GROUP)
        self.method: ExpertMethod

    def expected(self) -> Shapes:
        config = self._config
        size, inner = config.expert_size, config.moe_intermediate_size
        matrices = {"w1": (inner, size), "w3": (inner, size), "w2": (size, inner)}
        return {
            f"{self._name}.{expert}.{part}.weight": shape
            for expert in range(config.num_experts)
            for part, shape in matrices.items()
        }

    def layer(self, weight_format: str) -> ExpertLayer:
        config, build = self._config, self._build
        situ = ("situ", config.situ_beta, config.situ_linear_beta)
        return ExpertLayer(
            name=self._name,
            num_experts=config.num_experts,
            top=config.num_experts_per_token,
            size=config.expert_size,
            inner=self._share[1] - self._share[0],
            activation=situ if config.hidden_act == "situ" else ("silu",),
            weight_format=weight_format,
            dtype=build.dtype,
            device=build.device,
            kinds=build.kinds,
            batch_invariant=build.batch_invariant,
            unfinalized_capacity=sys.maxsize,
        )

    def load(self, source: WeightSource) -> None:
        formats = dict.fromkeys(source.infos[name].format for name in self.expected())
        layer = self.layer("+".join(formats))
        self.method = self._build.expert_method(layer) or DenseExperts(layer, self._build.ops)
        if not layer.inner:
            # More ranks than groups: this one has no part in the layer.
            return
        self.method.load(lambda expert, part: self._matrix(source, expert, part))

    def _matrix(self, source: WeightSource, expert: int, part: str) -> WeightTensor:
        tensor = source.get(f"{self._name}.{expert}.{part}.weight")
        return tensor.part(1 if part == "w2" else 0, *self._share)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | UnfinalizedExperts:
        """As `ExpertMethod.apply`; nothing for a rank that has no part of any expert."""
        if self._share[0] == self._share[1]:
            return weights.new_zeros(x.shape)
        return self.method.apply(x, weights, ids)


class MoE:
    """Router, routed experts in their latent space, and shared experts on the full width."""

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Projection(
            f"{name}.gate", hidden, [(f"{name}.gate", config.num_experts)], widened(build)
        )
        self.experts = Experts(f"{name}.experts", config, build)
        self.down = self.up = self.norm = self.shared = None
        if latent is not None:
            down, up = f"{name}.routed_expert_down_proj", f"{name}.routed_expert_up_proj"
            self.down = Projection(down, hidden, [(down, latent)], build)
            self.up = Projection(up, latent, [(up, hidden)], build)
        if config.latent_moe_use_norm and latent is not None:
            norm = f"{name}.routed_expert_norm"
            self.norm = RMSNorm(norm, latent, config.rms_norm_eps, build.ops)
        if config.num_shared_experts:
            inner = config.moe_intermediate_size * config.num_shared_experts
            self.shared = gated_mlp(f"{name}.shared_experts", config, inner, build)

    def _parts(self) -> list[Projection | MLP]:
        given = (self.gate, self.down, self.up, self.shared)
        return [part for part in given if part is not None]

    def expected(self) -> Shapes:
        shapes = self.experts.expected()
        for part in self._parts():
            shapes |= part.expected()
        if self.norm is not None:
            shapes[f"{self.norm.name}.weight"] = (self.norm.size,)
        bias = f"{self._name}.gate.e_score_correction_bias"
        return shapes | {bias: (self._config.num_experts,)}

    def load(self, source: WeightSource) -> None:
        build = self._build
        for part in self._parts():
            part.load(source)
        if self.norm is not None:
            self.norm.load(source, build.dtype, build.device)
        bias = source.get(f"{self._name}.gate.e_score_correction_bias")
        self._bias = bias.dense(wide(build.dtype)).to(build.device)
        self.experts.load(source)

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, D] to [T, D]."""
        weights, ids = self._route(x)
        routed = self._tail(
            self.experts(x if self.down is None else self.down(x), weights, ids), x.dtype
        )
        shared = None if self.shared is None else self.shared(x)
        if self.up is not None:
            method = self.up.linear.method
            if shared is not None and type(method) is Dense:
                return self._build.ops.linear_add(routed, method.weight, shared)
            routed = self.up(routed)
        return routed if shared is None else routed + shared

    def _tail(self, routed: Tensor | UnfinalizedExperts, dtype: torch.dtype) -> Tensor:
        """The ranks' parts summed, then normalized; the norm is not linear, so never before."""
        ops, norm, tp = self._build.ops, self.norm, self._build.tp
        if isinstance(routed, UnfinalizedExperts):
            parts = (routed.rows, routed.weights, routed.row_map)
            if norm is not None:
                return ops.latent_tail(*parts, norm.weight, norm.eps, tp)
            routed = ops.finalize_experts(*parts)
        summed = tp.all_reduce(routed).to(dtype)
        return summed if norm is None else norm(summed)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        weights, ids = self._build.ops.route(
            self.gate(x.to(self._bias.dtype)),
            self._bias,
            config.num_experts_per_token,
            sigmoid=config.moe_router_activation_func == "sigmoid",
            groups=config.num_expert_group,
            top_groups=config.topk_group,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
        )
        return weights, ids
