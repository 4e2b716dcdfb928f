"""The Kimi family's configuration: Kimi K3, and Kimi-Linear as other values of the same switches.

Field names are those of ``config.json``, whose text part K3 nests under ``text_config``. This
module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from interlock.errors import ConfigError, WeightsError
from interlock.weights.fields import Fields
from interlock.weights.quantization import GROUP, refuse_quantization

KIMI: Final = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
STATE_BYTES: Final = 4
"""Recurrent states are float32 whatever the model's dtype is."""


@attrs.frozen(kw_only=True)
class KimiConfig:
    """Sizes and switches. None switches a part off: see each field."""

    architecture: str
    prefix: str = ""
    """What stands before ``model.`` and ``lm_head.`` in tensor names."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    """None: one projection of the queries instead of two."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool
    """True: the positional part of queries and keys is not rotated."""
    mla_use_output_gate: bool
    mla_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    """None: log decay ``-exp(A) softplus(z)``, else ``bound * sigmoid(exp(A) z)``."""
    use_full_rank_gate: bool
    full_attention_layers: tuple[int, ...]
    """Layers with MLA, counted from 0; all others have KDA."""
    attn_res_block_size: int | None
    """None: an ordinary residual stream."""
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    """Width of the latent that routed experts work in; None: the hidden size itself."""
    latent_moe_use_norm: bool
    moe_renormalize: bool
    moe_router_activation_func: str
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int
    first_k_dense_replace: int
    moe_layer_freq: int
    hidden_act: str
    situ_beta: float = 4.0
    situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def kda_size(self) -> int:
        return self.kda_num_heads * self.kda_head_dim

    @property
    def latent_size(self) -> int:
        """Elements that one token keeps in the cache of one MLA layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_size(self) -> int:
        """Width that routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def num_mla_layers(self) -> int:
        return len(self.full_attention_layers)

    @property
    def num_kda_layers(self) -> int:
        return self.num_hidden_layers - self.num_mla_layers

    def is_full_attention(self, layer: int) -> bool:
        return layer in self.full_attention_layers

    def is_moe(self, layer: int) -> bool:
        dense = layer < self.first_k_dense_replace or layer % self.moe_layer_freq
        return bool(self.num_experts) and not dense

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of latents that one token keeps over all layers; the same on every rank."""
        return self.num_mla_layers * self.latent_size * element_bytes

    def state_bytes_per_sequence(self, element_bytes: int = 2, tp: int = 1) -> int:
        """Bytes of recurrent states and convolution windows that one sequence keeps on a rank."""
        state = self.kda_num_heads * self.kda_head_dim**2 * STATE_BYTES
        window = 3 * self.kda_size * (self.short_conv_kernel_size - 1) * element_bytes
        return self.num_kda_layers * (state + window) // tp

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError if the heads cannot be spread over ``tp`` ranks."""
        for name in ("num_attention_heads", "kda_num_heads"):
            heads = getattr(self, name)
            if heads % tp:
                sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                raise ConfigError(
                    f"engine.tp: {name} is {heads}, which {tp} ranks cannot share "
                    f"evenly; use one of {sizes}"
                )


def from_fields(fields: Fields, architecture: str, eos: Sequence[int]) -> KimiConfig:
    """Read a configuration; `WeightsError` names the field that is missing or cannot be."""
    text = fields.object("text_config") if "text_config" in fields.data else fields
    linear = text.object("linear_attn_config")
    layers = text.integer("num_hidden_layers")
    refuse_quantization(fields)
    refuse_quantization(text)
    _refuse(text)
    config = KimiConfig(
        architecture=architecture,
        prefix="language_model." if architecture == KIMI[0] else "",
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_hidden_layers=layers,
        full_attention_layers=_full_layers(linear, layers),
        tie_word_embeddings=text.flag("tie_word_embeddings", False),
        max_position_embeddings=text.integer(
            "max_position_embeddings", text.data.get("model_max_length")
        ),
        rms_norm_eps=text.number("rms_norm_eps", 1e-5),
        attn_res_block_size=text.optional_integer("attn_res_block_size"),
        hidden_act=str(text.data.get("hidden_act", "silu")),
        situ_beta=text.number("activation_situ_beta", 4.0),
        situ_linear_beta=text.optional_number("activation_situ_linear_beta"),
        bos_token_id=next(iter(text.ids("bos_token_id")), None),
        eos_token_ids=tuple(eos) or text.ids("eos_token_id"),
        dtype=_dtype(text),
        **_attention(text, linear),
        **_experts(text),
    )
    _check(config, str(fields.path))
    if text.data.get("quantization_config"):
        _check_groups(config, str(fields.path))
    return config


def _dtype(text: Fields) -> str:
    value = text.data.get("dtype") or text.data.get("torch_dtype") or "bfloat16"
    return str(value).removeprefix("torch.")


def _attention(text: Fields, linear: Fields) -> dict[str, Any]:
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads", heads) != heads:
        raise WeightsError(f"{text.path}: num_key_value_heads must equal num_attention_heads (MLA)")
    rope = text.object("rope_parameters") if text.data.get("rope_parameters") else text
    return {
        "num_attention_heads": heads,
        "q_lora_rank": text.optional_integer("q_lora_rank"),
        "kv_lora_rank": text.integer("kv_lora_rank"),
        "qk_nope_head_dim": text.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": text.integer("qk_rope_head_dim"),
        "v_head_dim": text.integer("v_head_dim"),
        "mla_use_nope": text.flag("mla_use_nope", False),
        "mla_use_output_gate": text.flag("mla_use_output_gate", False),
        "mla_norm_eps": text.number("mla_norm_eps", 1e-6),
        "rope_theta": rope.number("rope_theta", 10000.0),
        "kda_num_heads": linear.integer("num_heads"),
        "kda_head_dim": linear.integer("head_dim"),
        "short_conv_kernel_size": linear.integer("short_conv_kernel_size"),
        "gate_lower_bound": linear.optional_real("gate_lower_bound"),
        "use_full_rank_gate": linear.flag("use_full_rank_gate", False),
    }


def _experts(text: Fields) -> dict[str, Any]:
    latent = text.optional_integer("routed_expert_hidden_size")
    return {
        "num_experts": text.integer("num_experts", 0),
        "num_experts_per_token": text.integer("num_experts_per_token", 0),
        "num_shared_experts": text.integer("num_shared_experts", 0),
        "moe_intermediate_size": text.integer("moe_intermediate_size", 0),
        "routed_expert_hidden_size": latent,
        "latent_moe_use_norm": latent is not None and text.flag("latent_moe_use_norm", False),
        "moe_renormalize": text.flag("moe_renormalize", True),
        "moe_router_activation_func": str(text.data.get("moe_router_activation_func", "sigmoid")),
        "routed_scaling_factor": text.number("routed_scaling_factor", 1.0),
        "num_expert_group": text.integer("num_expert_group", 1),
        "topk_group": text.integer("topk_group", 1),
        "first_k_dense_replace": text.integer("first_k_dense_replace", 0),
        "moe_layer_freq": text.integer("moe_layer_freq", 1),
    }


def _full_layers(linear: Fields, layers: int) -> tuple[int, ...]:
    """The MLA layers counted from 0; the file counts from 1 and lists both kinds."""
    full, kda = linear.ids("full_attn_layers"), linear.ids("kda_layers")
    if sorted([*full, *kda]) != list(range(1, layers + 1)):
        raise WeightsError(
            f"{linear.path}: linear_attn_config.full_attn_layers and kda_layers must name each of "
            f"the layers 1 to {layers} once"
        )
    return tuple(layer - 1 for layer in sorted(full))


def _check_groups(config: KimiConfig, where: str) -> None:
    """Inputs of packed experts come in whole groups."""
    for name in ("moe_intermediate_size", "expert_size"):
        if (size := getattr(config, name)) % GROUP:
            field = "routed_expert_hidden_size" if name == "expert_size" else name
            raise WeightsError(
                f"{where}: {field} must be a multiple of {GROUP} with packed experts, not {size}"
            )


def _refuse(text: Fields) -> None:
    """Stop on options that would silently change the results."""
    rope = text.data.get("rope_parameters") or text.data.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else rope
    if kind not in (None, "default") and not text.flag("mla_use_nope", False):
        raise WeightsError(
            f"{text.path}: rope_scaling {kind!r} is not supported with mla_use_nope false"
        )
    for name, known in _CHOICES.items():
        value = text.data.get(name)
        if value is not None and value not in known:
            raise WeightsError(
                f"{text.path}: {name} {value!r} is not supported; known: {', '.join(known)}"
            )


_CHOICES: Final = {
    "hidden_act": ("situ", "silu", "swish"),
    "topk_method": ("noaux_tc",),
    "moe_router_activation_func": ("sigmoid", "softmax"),
}


def _check(config: KimiConfig, where: str) -> None:
    positive = [name for name in _POSITIVE if getattr(config, name) < 1]
    if positive:
        raise WeightsError(f"{where}: {positive[0]} must be at least 1")
    if config.num_experts:
        if config.moe_intermediate_size < 1:
            raise WeightsError(f"{where}: moe_intermediate_size must be at least 1")
        if not 1 <= config.num_experts_per_token <= config.num_experts:
            raise WeightsError(
                f"{where}: num_experts_per_token must be between 1 and num_experts "
                f"({config.num_experts}), not {config.num_experts_per_token}"
            )
        if config.num_experts % config.num_expert_group:
            raise WeightsError(
                f"{where}: num_expert_group {config.num_expert_group} does not divide num_experts "
                f"{config.num_experts}"
            )
        if not 1 <= config.topk_group <= config.num_expert_group:
            raise WeightsError(
                f"{where}: topk_group must be between 1 and num_expert_group, "
                f"not {config.topk_group}"
            )


_POSITIVE: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "kda_num_heads",
    "kda_head_dim",
    "short_conv_kernel_size",
    "max_position_embeddings",
    "num_expert_group",
    "moe_layer_freq",
)
