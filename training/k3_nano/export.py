"""Between the training module and a checkpoint in Kimi K3's names and packing.

python export.py --run run/final.pt --tokenizer FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from model import K3Nano, dequantize, pack, quantize, unpack
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "language_model."
PADDED_HEADS = 16
WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def names(state: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(name in the module, name in the checkpoint) of everything but routed experts."""
    for name in state:
        if name.endswith((".w1", ".w2", ".w3")):
            continue
        moe = ".routed_expert_" in name or ".shared_experts." in name or ".gate.weight" in name
        moe = moe or "e_score_correction_bias" in name
        new = name.replace(".feed_forward.", ".block_sparse_moe." if moe else ".mlp.")
        new = new.replace(".e_score_correction_bias", ".gate.e_score_correction_bias")
        for part in ("self_attention_res", "mlp_res", "output_attn_res"):
            for leaf in ("norm", "proj"):
                new = new.replace(f"{part}.{leaf}", f"{part}_{leaf}.weight")
        yield name, f"{PREFIX}{new}" if new.startswith("lm_head") else f"{PREFIX}model.{new}"


def experts(state: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name in state:
        if name.endswith((".w1", ".w2", ".w3")):
            base = name.replace(".feed_forward.", ".block_sparse_moe.experts.{}.")
            yield name, f"{PREFIX}model.{base}"


def checkpoint(net: K3Nano) -> dict[str, Tensor]:
    """Every tensor as it is stored: packed experts, float32 exceptions, bfloat16 otherwise."""
    state = net.state_dict()
    tensors = {}
    for name, new in names(state):
        wide = new.endswith(WIDE)
        tensor = state[name].to(torch.float32 if wide else torch.bfloat16)
        if name.endswith("A_log"):
            tensor = torch.nn.functional.pad(tensor, (0, PADDED_HEADS - len(tensor)))
        tensors[new] = tensor.contiguous()
    for name, new in experts(state):
        codes, scales = quantize(state[name])
        for expert in range(len(codes)):
            tensors[new.format(expert) + ".weight_packed"] = pack(codes[expert]).contiguous()
            tensors[new.format(expert) + ".weight_scale"] = scales[expert].contiguous()
    return tensors


def load_checkpoint(folder: Path, dtype: torch.dtype) -> K3Nano:
    """The training module with an exported folder's weights, exactly as they are stored."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    net = K3Nano(config).to(dtype)
    state = net.state_dict()
    for name, new in names(state):
        tensor = stored[new].flatten()[: state[name].numel()]
        state[name] = tensor.view(state[name].shape).to(dtype)
    for name, new in experts(state):
        parts = []
        for expert in range(len(state[name])):
            base = new.format(expert)
            codes = unpack(stored[f"{base}.weight_packed"])
            parts.append(dequantize(codes, stored[f"{base}.weight_scale"]))
        state[name] = torch.stack(parts).to(dtype)
    net.load_state_dict(state)
    for module in net.modules():
        if hasattr(module, "quantized"):
            module.quantized = False
    return net.eval()


def export(net: K3Nano, tokenizer: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint(net), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(Path(__file__).parent / "config.json", folder / "config.json")
    generation = {"bos_token_id": 4096, "eos_token_id": 4098, "pad_token_id": 4159}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    config = json.loads((Path(__file__).parent / "config.json").read_text())
    net = K3Nano(config)
    net.load_state_dict(torch.load(given.run, weights_only=True)["state"])
    export(net, given.tokenizer, given.out)


if __name__ == "__main__":
    main()
