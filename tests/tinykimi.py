"""Tiny random models of the Kimi family, in their checkpoints' names, written in milliseconds."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from interlock import ops
from interlock.models.kimi_k3 import KimiModel
from interlock.weights.config_hf import from_folder
from interlock.weights.packed_fp4 import pack

WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
RANKS = 300
LINEAR: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
    "full_attn_layers": [3, 5, 6],
    "kda_layers": [1, 2, 4],
}
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": RANKS + 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 96,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "attn_res_block_size": 2,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": RANKS,
    "eos_token_id": RANKS + 2,
    "pad_token_id": RANKS + 63,
    "linear_attn_config": LINEAR,
}


def config_of(linear: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """A K3 config.json; None removes a field of the text part."""
    text = {**TEXT, **overrides, "linear_attn_config": {**LINEAR, **(linear or {})}}
    text = {key: value for key, value in text.items() if value is not None}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
    }


# Kimi-Linear's values of the switches.
OFF: dict[str, Any] = {
    "q_lora_rank": None,
    "mla_use_output_gate": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": None,
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
}
LINEAR_OFF: dict[str, Any] = {"gate_lower_bound": None, "use_full_rank_gate": False}


def write_tiny_kimi_linear(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """The same with Kimi-Linear's switches, names and layout."""
    text = config_of(LINEAR_OFF, **{**OFF, **overrides})["text_config"]
    folder.mkdir(parents=True, exist_ok=True)
    config = {**text, "architectures": ["KimiLinearForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    tensors = _tensors(folder, seed, packed=False)
    for name in [name for name in tensors if name.endswith("A_log")]:
        tensors[name] = tensors[name][:4].view(1, 1, 4, 1).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tiny_kimi(
    folder: Path,
    *,
    seed: int = 0,
    packed: bool = True,
    linear: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A random checkpoint in K3's names and layout, with its tokenizer; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(linear, **overrides)))
    write_tokenizer(folder)
    save_file(_tensors(folder, seed, packed), folder / "model.safetensors")
    return folder


def _tensors(folder: Path, seed: int, packed: bool) -> dict[str, torch.Tensor]:
    config: Any = from_folder(folder)
    table = ops.build(torch.device("cpu"), torch.float64, {})
    shapes = KimiModel(
        config, table, lambda **_: None, torch.float64, torch.device("cpu")
    ).expected_weights()
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=random, dtype=torch.float64)
        stored = _scaled(name, value)
        if packed and ".experts." in name and "shared" not in name:
            base = name.removesuffix("weight")
            tensors[f"{base}weight_packed"], tensors[f"{base}weight_scale"] = pack(stored)
        else:
            wide = name.endswith(WIDE)
            tensors[name] = stored.to(torch.float32 if wide else torch.bfloat16).contiguous()
    return tensors


def _scaled(name: str, value: torch.Tensor) -> torch.Tensor:
    """Weights of a size with which signals neither vanish nor explode."""
    if name.endswith("A_log"):
        # Padded behind the heads, as in K3's files.
        return torch.nn.functional.pad(value * 0.3, (0, 4))
    if name.endswith("dt_bias"):
        return value - 2.0
    if "norm" in name:
        return 1.0 + 0.1 * value
    if "conv1d" in name:
        return value * 0.5
    if "e_score" in name:
        return value * 0.05
    if "embed_tokens" in name:
        return value
    return value * 1.5 / math.sqrt(value.shape[-1])


def write_tokenizer(folder: Path) -> None:
    """300 ranks (bytes and pairs of letters) and K3's specials behind them."""
    tokens = [bytes((i,)) for i in range(256)]
    pairs = [a + b for a in "etaoinsr" for b in "etaoinhr"]
    tokens += [pair.encode() for pair in pairs[: RANKS - 256]]
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    names = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    added = {
        str(RANKS + offset): {"content": name, "special": True} for offset, name in enumerate(names)
    }
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
