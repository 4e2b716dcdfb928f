"""k3-nano's DSpark drafter as a plain module (architecture: DSpark, arXiv 2607.05147).

Context rows are projected from the target's hidden states and never pass through the layers. A
block of rows, the newest token and masks behind it, attends to the context and, in both
directions, to itself; row k proposes the k-th next token. A Markov head adds what the token before
makes likely, a confidence head says how likely a proposal is to be accepted.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from model import Norm, linear
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

CONFIG: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 160,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 4160,
    "draft_vocab_size": 4160,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "num_target_layers": 3,
    "target_hidden_size": 160,
    "target_num_hidden_layers": 12,
    "target_layer_ids": [3, 7, 11],
    "mask_token_id": 4157,
    "bos_token_id": 4096,
    "eos_token_id": 4098,
    "pad_token_id": 4159,
    "markov_rank": 48,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "num_speculative_tokens": 8,
    "torch_dtype": "bfloat16",
}


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding on neighbouring pairs: x [..., n, heads, P], positions [..., n]."""
    half = x.shape[-1] // 2
    periods = theta ** (torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[..., None].float() / periods)[..., None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class DraftLayer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c, hidden, eps = c, c["hidden_size"], c["rms_norm_eps"]
        self.heads, self.nope = c["num_attention_heads"], c["qk_nope_head_dim"]
        self.rope, self.value = c["qk_rope_head_dim"], c["v_head_dim"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        attention = nn.Module()
        attention.q_a_proj = linear(hidden, c["q_lora_rank"])
        attention.q_a_layernorm = Norm(c["q_lora_rank"], 1e-6)
        attention.q_b_proj = linear(c["q_lora_rank"], self.heads * (self.nope + self.rope))
        attention.kv_a_proj_with_mqa = linear(hidden, c["kv_lora_rank"] + self.rope)
        attention.kv_a_layernorm = Norm(c["kv_lora_rank"], 1e-6)
        attention.kv_b_proj = linear(c["kv_lora_rank"], self.heads * (self.nope + self.value))
        attention.o_proj = linear(self.heads * self.value, hidden, 0.5)
        self.self_attn = attention
        mlp = nn.Module()
        mlp.gate_proj = linear(hidden, c["intermediate_size"])
        mlp.up_proj = linear(hidden, c["intermediate_size"])
        mlp.down_proj = linear(c["intermediate_size"], hidden, 0.5)
        self.mlp = mlp

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., n, H, N + P] and values [..., n, H, V] of rows x [..., n, D]."""
        a, rank = self.self_attn, self.c["kv_lora_rank"]
        latent = a.kv_a_proj_with_mqa(x)
        k_pe = rotate(latent[..., None, rank:], positions, self.c["rope_theta"])
        kv = a.kv_b_proj(a.kv_a_layernorm(latent[..., :rank])).unflatten(-1, (self.heads, -1))
        shared = k_pe.expand(*k_pe.shape[:-2], self.heads, self.rope)
        return torch.cat([kv[..., : self.nope], shared], -1), kv[..., self.nope :]

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        a = self.self_attn
        q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        turned = rotate(q[..., self.nope :], positions, self.c["rope_theta"])
        return torch.cat([q[..., : self.nope], turned], -1)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Blocks x [B, A, W, D] over context rows [B, T, D].

        positions [B, A, W]; visible [B, A, T] says which context rows a block sees.
        """
        normed = self.input_layernorm(x)
        where = torch.arange(context.shape[1]).expand(context.shape[:2])
        keys, values = self.keys_values(context, where)
        own_keys, own_values = self.keys_values(normed, positions)
        q = self.queries(normed, positions) * (self.nope + self.rope) ** -0.5
        far = torch.einsum("bawhd,bthd->bhawt", q, keys)
        far = far.masked_fill(~visible[:, None, :, None], -torch.inf)
        near = torch.einsum("bawhd,bavhd->bhawv", q, own_keys)
        weights = torch.cat([far, near], -1).softmax(-1)
        count = context.shape[1]
        out = torch.einsum("bhawt,bthd->bawhd", weights[..., :count], values)
        out = out + torch.einsum("bhawv,bavhd->bawhd", weights[..., count:], own_values)
        x = x + self.self_attn.o_proj(out.flatten(-2))
        y = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(y)) * self.mlp.up_proj(y))


class Drafter(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        c = self.c = config
        hidden, rank = c["hidden_size"], c["markov_rank"]
        self.context_proj = linear(c["num_target_layers"] * c["target_hidden_size"], hidden)
        self.context_norm = Norm(hidden, c["rms_norm_eps"])
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c["num_hidden_layers"]))
        self.final_norm = Norm(hidden, c["rms_norm_eps"])
        markov = nn.Module()
        markov.markov_w1 = nn.Embedding(c["vocab_size"], rank)
        markov.markov_w2 = linear(rank, c["vocab_size"], 0.1)
        nn.init.normal_(markov.markov_w1.weight, std=1 / math.sqrt(rank))
        self.markov_head = markov
        confidence = nn.Module()
        confidence.proj = nn.Linear(hidden + rank, 1)
        self.confidence_head = confidence

    def context(self, taps: Tensor) -> Tensor:
        """Context rows of taps [..., T, taps * D]."""
        return self.context_norm(self.context_proj(taps))

    def hidden(self, context: Tensor, anchors: Tensor, first: Tensor, embed: Tensor) -> Tensor:
        """Final states [B, A, W, D] of blocks that begin with ``first`` [B, A] at ``anchors``."""
        width = self.c["num_speculative_tokens"]
        ids = torch.full((*first.shape, width), self.c["mask_token_id"])
        ids[..., 0] = first
        positions = anchors[..., None] + torch.arange(width)
        visible = torch.arange(context.shape[1]) < anchors[..., None]
        x = embed[ids]
        for layer in self.layers:
            x = layer(x, context, positions, visible)
        return self.final_norm(x)

    def markov(self, before: Tensor) -> Tensor:
        return self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logit of being accepted, for states [..., D] and the tokens before them."""
        features = torch.cat([hidden, self.markov_head.markov_w1(before)], -1)
        return self.confidence_head.proj(features)[..., 0]

    @torch.no_grad()
    def propose(
        self, context: Tensor, anchor: int, first: int, embed: Tensor, head: Tensor
    ) -> list[int]:
        """Greedy proposals for one sequence; context [T, D] rows before ``anchor``."""
        where, token = torch.tensor([[anchor]]), torch.tensor([[first]])
        states = self.hidden(context[None, :anchor], where, token, embed)[0, 0]
        logits, drafts = states @ head.T, []
        for row in logits:
            token = (row + self.markov(torch.tensor(first))).argmax()
            first = int(token)
            drafts.append(first)
        return drafts


def save(drafter: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in drafter.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(drafter.c, indent=1) + "\n")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    drafter = Drafter(json.loads((folder / "config.json").read_text()))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.to(dtype).eval()
