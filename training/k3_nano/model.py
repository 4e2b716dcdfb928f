"""k3-nano as one plain module, written from the formulas of the Kimi K3 architecture.

It shares no code with the engine, so that it can be the engine's oracle: in float64 the two must
agree. Attribute names are those of the checkpoint. Shapes: B sequences, T tokens, D hidden,
H heads, K = V = head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 16


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def wide(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    v = wide(x)
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``."""
    g, u = wide(gate), wide(up)
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return y.to(gate.dtype)


class MLP(nn.Module):
    def __init__(self, c: dict[str, Any], inner: int) -> None:
        super().__init__()
        self.c = c
        self.gate_proj = linear(c["hidden_size"], inner)
        self.up_proj = linear(c["hidden_size"], inner)
        self.down_proj = linear(inner, c["hidden_size"], 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(activation(self.c, self.gate_proj(x), self.up_proj(x)))


def activation(c: dict[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    return situ(gate, up, c["activation_situ_beta"], c["activation_situ_linear_beta"])


# -- MXFP4 ---------------------------------------------------------------------------------------

GROUP = 32
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes (uint8, 0 to 15) and e8m0 scale bytes [..., K / 32] of ``weight`` [..., K].

    The scale is the smallest power of two with which no element of a group exceeds 6.
    """
    groups = weight.detach().float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    exponent = torch.ceil(torch.log2(largest / 6.0)).clamp(-127, 127)
    scaled = groups / torch.exp2(exponent)
    codes = torch.bucketize(scaled.abs(), MIDDLES).to(torch.uint8)
    codes = codes + 8 * (scaled < 0).to(torch.uint8)
    return codes.flatten(-2), (exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Exact values, float32 [..., K]."""
    values = torch.cat([VALUES, -VALUES])[codes.long()].unflatten(-1, (-1, GROUP))
    return (values * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Two codes per byte: element 2j in the low nibble of byte j."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def fake_quantize(weight: Tensor) -> Tensor:
    """The dequantized weight, with the gradient of the weight itself."""
    return weight + (dequantize(*quantize(weight)).to(weight.dtype) - weight).detach()


# -- KDA -----------------------------------------------------------------------------------------


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: q, k, v, g [B, T, H, K], beta [B, T, H], state [B, H, K, V]."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same from a zero state, 16 tokens at a time; T is a multiple of 16.

    Within a chunk exponents are taken relative to its middle: at most 8 * 5 in magnitude.
    """
    q, k, v, g = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))
    b = beta.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).unsqueeze(-1)
    total = g.cumsum(3)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    up, down = (total - middle).exp(), (middle - total).exp()
    lower = (k * down).transpose(-1, -2)
    a = torch.tril(b * ((k * up) @ lower), -1)
    scores = torch.tril((q * up) @ lower)
    grown = total.exp()
    solved = _inverse(a) @ torch.cat([b * v, b * grown * k], dim=-1)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:, :]
    return _scan(u, w, q * grown, scores, k * (last - total).exp(), last.exp())


def _inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 for a strictly lower triangular A of 16 rows, by Neumann doubling."""
    identity = torch.eye(CHUNK, dtype=a.dtype)
    result, power = identity - a, a @ a
    for _ in range(2):
        result, power = result + result @ power, power @ power
    return result + result @ power


def _scan(u: Tensor, w: Tensor, q: Tensor, scores: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    batch, heads, chunks, _, size = u.shape
    state = u.new_zeros(batch, heads, w.shape[-1], size)
    outputs = []
    for n in range(chunks):
        fresh = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + scores[:, :, n] @ fresh)
        state = state * decay[:, :, n].transpose(-1, -2) + k[:, :, n].transpose(-1, -2) @ fresh
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)


class KDA(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        kda = c["linear_attn_config"]
        self.heads, self.size = kda["num_heads"], kda["head_dim"]
        self.kernel, self.bound = kda["short_conv_kernel_size"], kda["gate_lower_bound"]
        hidden, inner = c["hidden_size"], self.heads * self.size
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, linear(hidden, inner))
            if name != "g_proj":
                conv = torch.randn(inner, 1, self.kernel) * 0.2
                conv[:, :, -1] += 0.8
                setattr(self, f"{name[0]}_conv1d", nn.ParameterDict({"weight": nn.Parameter(conv)}))
        self.b_proj = linear(hidden, self.heads)
        self.f_a_proj = linear(hidden, self.size)
        self.f_b_proj = linear(self.size, inner)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        # Decay rates from almost none to strong, spread over the channels.
        self.dt_bias = nn.Parameter(torch.linspace(-6.0, 1.0, self.size).repeat(self.heads))
        self.o_norm = Norm(self.size, c["rms_norm_eps"])
        self.o_proj = linear(inner, hidden, 0.5)

    def _conv(self, x: Tensor, weight: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, self.kernel - 1, 0))
        length = x.shape[1]
        parts = [padded[:, i : i + length] * weight[:, 0, i] for i in range(self.kernel)]
        return F.silu(sum(parts[1:], parts[0]))

    def _project(self, x: Tensor) -> list[Tensor]:
        layers = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        weights = [layer.weight for layer in layers]
        return list(F.linear(x, torch.cat(weights)).split([len(w) for w in weights], dim=-1))

    def forward(self, x: Tensor, *, chunked: bool = True) -> Tensor:
        length = x.shape[1]
        if chunked:
            x = F.pad(x, (0, 0, 0, -length % CHUNK))
        *qkv, gate, decay, beta = self._project(x)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        joined = torch.cat([conv["weight"] for conv in convs])
        mixed = self._conv(wide(torch.cat(qkv, dim=-1)), joined).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, self.size)) for y in mixed)
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * self.size**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        g = self._log_decay(self.f_b_proj(decay))
        b = torch.sigmoid(wide(beta))
        if chunked:
            out = kda_chunked(q, k, v, g, b)
        else:
            zero = q.new_zeros(len(x), self.heads, self.size, self.size)
            out = kda_recurrent(q, k, v, g, b, zero)[0]
        normed = self.o_norm(out.to(x.dtype)).flatten(-2) * torch.sigmoid(gate)
        return self.o_proj(normed)[:, :length]

    def _log_decay(self, z: Tensor) -> Tensor:
        z = (wide(z) + self.dt_bias).unflatten(-1, (self.heads, self.size))
        rate = self.A_log.exp()[:, None]
        if self.bound is None:
            return -rate * F.softplus(z)
        return self.bound * torch.sigmoid(rate * z)


class MLA(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c, self.heads = c, c["num_attention_heads"]
        self.nope, self.rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.value, self.rank = c["v_head_dim"], c["kv_lora_rank"]
        hidden, eps = c["hidden_size"], 1e-6
        self.q_a_proj = linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = linear(c["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, eps)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.value))
        self.g_proj = linear(hidden, self.heads * self.value)
        self.o_proj = linear(self.heads * self.value, hidden, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        shared = k_pe.unsqueeze(2).expand(-1, -1, self.heads, -1)
        k = torch.cat([k_nope, shared], dim=-1)
        scale = (self.nope + self.rope) ** -0.5
        heads_first = [y.transpose(1, 2) for y in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)
        mixed = out.transpose(1, 2).flatten(2)
        return self.o_proj(mixed * torch.sigmoid(self.g_proj(x)))


class MoE(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c, self.count, self.top = c, c["num_experts"], c["num_experts_per_token"]
        hidden, latent = c["hidden_size"], c["routed_expert_hidden_size"]
        inner = c["moe_intermediate_size"]
        self.gate = linear(hidden, self.count)
        self.register_buffer("e_score_correction_bias", torch.zeros(self.count))
        self.routed_expert_down_proj = linear(hidden, latent)
        self.routed_expert_up_proj = linear(latent, hidden, 0.5)
        self.routed_expert_norm = Norm(latent, c["rms_norm_eps"])
        self.shared_experts = MLP(c, inner * c["num_shared_experts"])
        self.w1 = nn.Parameter(torch.randn(self.count, inner, latent) / math.sqrt(latent))
        self.w3 = nn.Parameter(torch.randn(self.count, inner, latent) / math.sqrt(latent))
        self.w2 = nn.Parameter(torch.randn(self.count, latent, inner) / math.sqrt(inner))
        self.quantized = True
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self._route(flat)
        routed = self._experts(self.routed_expert_down_proj(flat), weights, chosen)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return (routed + self.shared_experts(flat)).view(x.shape)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(F.linear(wide(x), self.gate.weight))
        chosen = (scores + self.e_score_correction_bias).topk(self.top, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.c["routed_scaling_factor"], chosen

    def _experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.count)
        if self.training:
            self.load = counts.float()
        rows = x[order // self.top].split(counts.tolist())
        w1, w3, w2 = (
            fake_quantize(w) if self.quantized else w for w in (self.w1, self.w3, self.w2)
        )
        w13 = torch.cat([w1, w3], dim=1)
        outputs = []
        for e, part in enumerate(rows):
            gate, up = F.linear(part, w13[e]).chunk(2, dim=-1)
            outputs.append(F.linear(activation(self.c, gate, up), w2[e]))
        scaled = torch.cat(outputs) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // self.top, scaled.to(x.dtype))


class Mix(nn.Module):
    """Softmax over the block vectors and the running sum, per token."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.proj = nn.Parameter(torch.zeros(1, hidden))
        self.eps = eps

    def forward(self, blocks: list[Tensor], running: Tensor) -> Tensor:
        candidates = torch.stack([*blocks, running])
        v = wide(candidates)
        weight = self.norm * self.proj[0]
        scores = (v * weight).sum(-1) * torch.rsqrt(v.pow(2).mean(-1) + self.eps)
        return (scores.softmax(0).unsqueeze(-1) * v).sum(0).to(running.dtype)


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        full = index + 1 in c["linear_attn_config"]["full_attn_layers"]
        self.self_attn = MLA(c) if full else KDA(c)
        dense = index < c["first_k_dense_replace"]
        self.feed_forward = MLP(c, c["intermediate_size"]) if dense else MoE(c)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attention_res = Mix(hidden, eps)
        self.mlp_res = Mix(hidden, eps)


class K3Nano(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        c = self.c = text_config(config)
        hidden = c["hidden_size"]
        self.embed_tokens = nn.Embedding(c["vocab_size"], hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.output_attn_res = Mix(hidden, c["rms_norm_eps"])
        self.norm = Norm(hidden, c["rms_norm_eps"])
        self.lm_head = linear(hidden, c["vocab_size"])

    def forward(
        self, tokens: Tensor, taps: tuple[int, ...] = (), *, chunked: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        """Final normed hidden states [B, T, D], and the running sum after each tapped layer."""
        p: Tensor | None = self.embed_tokens(tokens)
        blocks: list[Tensor] = []
        tapped: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert p is not None
            h = layer.self_attention_res(blocks, p) if blocks else p
            if index % self.c["attn_res_block_size"] == 0:
                blocks, p = [*blocks, p], None
            x = layer.input_layernorm(h)
            if isinstance(layer.self_attn, KDA):
                a = layer.self_attn(x, chunked=chunked)
            else:
                a = layer.self_attn(x)
            p = a if p is None else p + a
            h = layer.mlp_res(blocks, p)
            p = p + layer.feed_forward(layer.post_attention_layernorm(h))
            if index in taps:
                tapped.append(p)
        return self.norm(self.output_attn_res(blocks, p)), tapped

    def logits(self, tokens: Tensor, *, chunked: bool = True) -> Tensor:
        return self.lm_head(self(tokens, chunked=chunked)[0])
