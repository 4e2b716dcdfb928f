"""Every tensor of a Kimi checkpoint, from the configuration alone. Imports no torch.

Names, shapes and formats are those of K3's released files; the vision part's are as its loaders
expect them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from interlock.weights.config_kimi import KimiConfig
from interlock.weights.quantization import GROUP

PADDED_HEADS = 128


class Sized(NamedTuple):
    shape: tuple[int, ...]
    format: str = "BF16"


Tensors = dict[str, Sized]


def kimi_tensors(
    config: KimiConfig, *, packed: bool, vision: Mapping[str, Any] | None = None
) -> Tensors:
    """Tensors by name; ``packed`` routed experts have two for each matrix."""
    root, size = f"{config.prefix}model", config.hidden_size
    tensors: Tensors = {
        f"{root}.embed_tokens.weight": Sized((config.vocab_size, size)),
        f"{root}.norm.weight": Sized((size,)),
    }
    if not config.tie_word_embeddings:
        tensors[f"{config.prefix}lm_head.weight"] = Sized((config.vocab_size, size))
    if config.attn_res_block_size is not None:
        tensors |= _mix(f"{root}.output_attn_res", size)
    for index in range(config.num_hidden_layers):
        tensors |= _layer(f"{root}.layers.{index}", index, config, packed)
    return tensors | (_vision(vision) if vision else {})


def _mix(name: str, size: int) -> Tensors:
    return {f"{name}_norm.weight": Sized((size,)), f"{name}_proj.weight": Sized((1, size))}


def _layer(name: str, index: int, config: KimiConfig, packed: bool) -> Tensors:
    size = config.hidden_size
    tensors: Tensors = {
        f"{name}.{norm}_layernorm.weight": Sized((size,)) for norm in ("input", "post_attention")
    }
    if config.attn_res_block_size is not None:
        tensors |= _mix(f"{name}.self_attention_res", size) | _mix(f"{name}.mlp_res", size)
    attention = _mla if config.is_full_attention(index) else _kda
    tensors |= attention(f"{name}.self_attn", config)
    if config.is_moe(index):
        return tensors | _moe(f"{name}.block_sparse_moe", config, packed)
    return tensors | _mlp(f"{name}.mlp", size, config.intermediate_size)


def _mlp(name: str, size: int, inner: int) -> Tensors:
    up = {f"{name}.{part}_proj.weight": Sized((inner, size)) for part in ("gate", "up")}
    return {**up, f"{name}.down_proj.weight": Sized((size, inner))}


def _kda(name: str, config: KimiConfig) -> Tensors:
    hidden, size, dim = config.hidden_size, config.kda_size, config.kda_head_dim
    parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (size, hidden))
    parts |= {"b_proj": (config.kda_num_heads, hidden), "o_proj": (hidden, size)}
    parts |= {"f_a_proj": (dim, hidden), "f_b_proj": (size, dim)}
    if config.use_full_rank_gate:
        parts["g_proj"] = (size, hidden)
    else:
        parts |= {"g_a_proj": (dim, hidden), "g_b_proj": (size, dim)}
    tensors = {f"{name}.{part}.weight": Sized(shape) for part, shape in parts.items()}
    for part in ("q", "k", "v"):
        conv = Sized((size, 1, config.short_conv_kernel_size), "F32")
        tensors[f"{name}.{part}_conv1d.weight"] = conv
    heads = -(-config.kda_num_heads // PADDED_HEADS) * PADDED_HEADS
    return tensors | {
        f"{name}.A_log": Sized((heads,), "F32"),
        f"{name}.dt_bias": Sized((size,), "F32"),
        f"{name}.o_norm.weight": Sized((dim,), "F32"),
    }


def _mla(name: str, config: KimiConfig) -> Tensors:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rows = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    parts: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (config.latent_size, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * config.qk_nope_head_dim + values, config.kv_lora_rank),
        "o_proj": (hidden, values),
    }
    if config.mla_use_output_gate:
        parts["g_proj"] = (values, hidden)
    rank = config.q_lora_rank
    if rank is None:
        parts["q_proj"] = (q_rows, hidden)
    else:
        parts |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (q_rows, rank)}
    return {f"{name}.{part}.weight": Sized(shape) for part, shape in parts.items()}


def _moe(name: str, config: KimiConfig, packed: bool) -> Tensors:
    hidden, size, inner = config.hidden_size, config.expert_size, config.moe_intermediate_size
    tensors: Tensors = {
        f"{name}.gate.weight": Sized((config.num_experts, hidden)),
        f"{name}.gate.e_score_correction_bias": Sized((config.num_experts,), "F32"),
    }
    if config.routed_expert_hidden_size is not None:
        tensors[f"{name}.routed_expert_down_proj.weight"] = Sized((size, hidden))
        tensors[f"{name}.routed_expert_up_proj.weight"] = Sized((hidden, size))
    if config.latent_moe_use_norm:
        tensors[f"{name}.routed_expert_norm.weight"] = Sized((size,))
    if config.num_shared_experts:
        shared = inner * config.num_shared_experts
        tensors |= _mlp(f"{name}.shared_experts", hidden, shared)
    for expert in range(config.num_experts):
        for part, shape in (("w1", (inner, size)), ("w3", (inner, size)), ("w2", (size, inner))):
            tensors |= _matrix(f"{name}.experts.{expert}.{part}", shape, packed)
    return tensors


def _matrix(name: str, shape: tuple[int, int], packed: bool) -> Tensors:
    if not packed:
        return {f"{name}.weight": Sized(shape)}
    rows, columns = shape
    return {
        f"{name}.weight_packed": Sized((rows, columns // 2), "U8"),
        f"{name}.weight_scale": Sized((rows, columns // GROUP), "U8"),
    }


def _vision(config: Mapping[str, Any]) -> Tensors:
    size, inner = config["hidden_size"], config["intermediate_size"]
    qkv, patch = config["qkv_hidden_size"], config["patch_size"]
    tower, text = "vision_tower", config["text_hidden_size"]
    places = (config["init_pos_emb_height"], config["init_pos_emb_width"], size)
    tensors: Tensors = {
        f"{tower}.patch_embed.proj.weight": Sized((size, 3, patch, patch)),
        f"{tower}.patch_embed.pos_emb.weight": Sized(places),
        f"{tower}.encoder.final_layernorm.weight": Sized((size,)),
    }
    block = {"norm0": (size,), "norm1": (size,), "wqkv": (3 * qkv, size), "wo": (size, qkv)}
    block |= {"mlp.fc0": (inner, size), "mlp.fc1": (size, inner)}
    for index in range(config["num_hidden_layers"]):
        for part, shape in block.items():
            tensors[f"{tower}.encoder.blocks.{index}.{part}.weight"] = Sized(shape)
    merged = size * config["merge_kernel_size"][0] * config["merge_kernel_size"][1]
    projector = {"proj.0": (merged, merged), "proj.2": (text, merged), "post_norm": (text,)}
    return tensors | {f"mm_projector.{k}.weight": Sized(v) for k, v in projector.items()}
