"""Mixture of experts, with routed experts in a narrower latent space if the model has one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from interlock.layers.linear import FixedRows
from interlock.layers.mlp import GROUP, MLP
from interlock.layers.norm import RMSNorm
from interlock.layers.projection import Build, Projection, Shapes, widened
from interlock.ops.reference import wide
from interlock.weights.config_kimi import KimiConfig
from interlock.weights.packed_fp4 import unpack
from interlock.weights.source import WeightSource

PACKED, SCALE = "weight_packed", "weight_scale"


def gated_mlp(name: str, config: KimiConfig, inner: int, build: Build) -> MLP:
    """``down(act(gate x, up x))`` with SiTU or SwiGLU, for dense layers and shared experts."""
    activation = None
    if config.hidden_act == "situ":
        activation = functools.partial(
            build.ops.situ_mul, beta=config.situ_beta, linear_beta=config.situ_linear_beta
        )
    return MLP(name, config.hidden_size, inner, build, activation=activation)


class DenseExperts:
    """All routed experts of a layer as dense weights; packed ones are dequantized when loaded.

    A rank holds a share of every expert's inner dimension, in groups of 32, so that packed weights
    are never cut inside a scale; its result is a part of the sum over the ranks.
    """

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        self._share = build.tp.share(config.moe_intermediate_size, GROUP)

    def expected(self, packed: bool) -> Shapes:
        config, shapes = self._config, Shapes()
        size, inner = config.expert_size, config.moe_intermediate_size
        matrices = {"w1": (inner, size), "w3": (inner, size), "w2": (size, inner)}
        for expert in range(config.num_experts):
            for part, (rows, columns) in matrices.items():
                name = f"{self._name}.{expert}.{part}"
                if packed:
                    shapes[f"{name}.{PACKED}"] = (rows, columns // 2)
                    shapes[f"{name}.{SCALE}"] = (rows, columns // GROUP)
                else:
                    shapes[f"{name}.weight"] = (rows, columns)
        return shapes

    def is_packed(self, source: WeightSource) -> bool:
        """Whether the files have packed experts: the only thing that says so reliably."""
        return f"{self._name}.0.w1.{PACKED}" in source.infos

    def load(self, source: WeightSource) -> None:
        build, config, share = self._build, self._config, slice(*self._share)
        inner, size = self._share[1] - self._share[0], config.expert_size
        count, dtype, device = config.num_experts, build.dtype, build.device
        self._w13 = torch.empty(count, 2 * inner, size, dtype=dtype, device=device)
        self._w2 = torch.empty(count, size, inner, dtype=dtype, device=device)
        for expert in range(count):
            self._w13[expert, :inner] = self._matrix(source, expert, "w1")[share]
            self._w13[expert, inner:] = self._matrix(source, expert, "w3")[share]
            self._w2[expert] = self._matrix(source, expert, "w2")[:, share]

    def _matrix(self, source: WeightSource, expert: int, part: str) -> Tensor:
        name = f"{self._name}.{expert}.{part}"
        if f"{name}.{PACKED}" not in source.infos:
            return source.get(f"{name}.weight").dense(self._build.dtype)
        packed, scale = source.raw(f"{name}.{PACKED}"), source.raw(f"{name}.{SCALE}")
        return unpack(packed, scale, self._build.dtype, name)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """X [T, D], weights and ids [T, top] to this rank's part of the sum, wide [T, D]."""
        config = self._config
        if not self._w2.shape[-1]:
            return weights.new_zeros(x.shape)
        beta = config.situ_beta if config.hidden_act == "situ" else None
        block = FixedRows.ROWS if self._build.batch_invariant else None
        return self._build.ops.run_experts(
            x, self._w13, self._w2, weights, ids, beta, config.situ_linear_beta, block
        )


class MoE:
    """Router, routed experts in their latent space, and shared experts on the full width."""

    def __init__(self, name: str, config: KimiConfig, build: Build) -> None:
        self._name, self._config, self._build = name, config, build
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Projection(
            f"{name}.gate", hidden, [(f"{name}.gate", config.num_experts)], widened(build)
        )
        self.experts = DenseExperts(f"{name}.experts", config, build)
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

    def expected(self, packed: bool) -> Shapes:
        shapes = self.experts.expected(packed)
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
        routed = self.experts(x if self.down is None else self.down(x), weights, ids)
        # The norm is not linear: ranks' parts are summed before it.
        routed = self._build.tp.all_reduce(routed).to(x.dtype)
        if self.norm is not None:
            routed = self.norm(routed)
        if self.up is not None:
            routed = self.up(routed)
        return routed if self.shared is None else routed + self.shared(x)

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
