"""Trains k3-nano from scratch for a given time: Muon for matrices, AdamW for the rest.

    python train.py --documents docs.jsonl.gz --tokenizer FOLDER --minutes 75 --out run/

The learning rate follows the share of the time that has passed: warm-up, constant, then linear to
zero. The experts are trained through their MXFP4 values from the first step on. A checkpoint
`run/last.pt` is written every few minutes, `run/final.pt` at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizer
import torch
from model import K3Nano, MoE
from torch import Tensor, nn
from torch.nn import functional as F

WARMUP, DECAY = 0.02, 0.5
SAVE_EVERY_S = 240.0
BALANCE = 3e-3


def tokens_of(documents: Path, folder: Path, held_out: bool) -> list[np.ndarray]:
    encoding = tokenizer.load(folder)
    found = [d for d in tokenizer.documents(documents) if d["held_out"] is held_out]
    return [np.array(tokenizer.encode(d["parts"], encoding), dtype=np.int64) for d in found]


def batches(documents: list[np.ndarray], batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Windows [batch, length + 1] of all documents, shuffled anew for each pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(documents))
        stream = np.concatenate([documents[i] for i in order])
        stream = stream[rng.integers(length) :]
        count = (len(stream) - 1) // length
        windows = np.stack([stream[i * length : i * length + length + 1] for i in range(count)])
        windows = windows[rng.permutation(count)]
        for start in range(0, count - batch + 1, batch):
            yield torch.from_numpy(windows[start : start + batch])


class Muon:
    """Momentum whose matrices are orthogonalized by Newton-Schulz steps (Jordan et al., 2024).

    Matrices of one shape are treated in one batch; experts are batches already.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            update = orthogonal(gradient.lerp(buffer, self.momentum))
            rows, columns = buffer.shape[-2:]
            scale = lr * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - lr * weight_decay).sub_(change, alpha=scale)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Roughly U V^T of each matrix's singular value decomposition U S V^T."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.transpose(-1, -2) if tall else x
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.transpose(-1, -2)
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.transpose(-1, -2) if tall else y


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    skipped = ("embed_tokens", "lm_head", "conv1d", "gate.weight", "_res.")
    return parameter.ndim >= 2 and not any(part in name for part in skipped)


def optimizers(net: K3Nano) -> tuple[Muon, torch.optim.AdamW]:
    matrices = [p for n, p in net.named_parameters() if is_matrix(n, p)]
    rest = [(n, p) for n, p in net.named_parameters() if not is_matrix(n, p)]
    embedding = [p for n, p in rest if "embed_tokens" in n]
    others = [p for n, p in rest if "embed_tokens" not in n]
    groups = [{"params": embedding, "scale": 3.0}, {"params": others, "scale": 1.0}]
    return Muon(matrices), torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)


def rate(share: float) -> float:
    """Factor on the learning rates after ``share`` of the time."""
    return max(0.0, min(1.0, share / WARMUP, (1 - share) / DECAY))


@torch.no_grad()
def balance(net: K3Nano, step: float) -> None:
    """Move the router's correction biases towards an even load (without a loss term)."""
    for module in net.modules():
        if isinstance(module, MoE) and module.load is not None:
            module.e_score_correction_bias += step * torch.sign(module.load.mean() - module.load)


@torch.no_grad()
def evaluate(net: K3Nano, documents: list[np.ndarray], length: int, limit: int) -> float:
    """Mean cross-entropy per token over the first ``limit`` windows of held-out documents."""
    net.eval()
    stream = np.concatenate(documents)
    count = min(limit, (len(stream) - 1) // length)
    windows = np.stack([stream[i * length : i * length + length + 1] for i in range(count)])
    losses = [_loss(net, rows).item() for rows in torch.from_numpy(windows).split(16)]
    net.train()
    return float(np.mean(losses))


def _loss(net: Any, rows: Tensor) -> Tensor:
    hidden, _ = net(rows[:, :-1])
    head = getattr(net, "_orig_mod", net).lm_head
    return F.cross_entropy(head(hidden).flatten(0, 1), rows[:, 1:].flatten())


def save(net: K3Nano, path: Path, facts: dict[str, Any]) -> None:
    torch.save({"state": net.state_dict(), "facts": facts}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(given.seed)
    torch.set_num_threads(given.threads)
    config = json.loads((Path(__file__).parent / "config.json").read_text())
    net = K3Nano(config)
    run = torch.compile(net) if given.compile else net
    train_set = tokens_of(given.documents, given.tokenizer, held_out=False)
    held_out = tokens_of(given.documents, given.tokenizer, held_out=True)
    np.random.default_rng(0).shuffle(held_out)
    muon, adam = optimizers(net)
    feed = batches(train_set, given.batch, given.length, given.seed)
    _warm(run, net, next(feed))
    started = saved = time.monotonic()
    step, share = 0, 0.0
    while share < 1.0:
        share = (time.monotonic() - started) / (60 * given.minutes)
        loss = _loss(run, next(feed))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        factor = rate(share)
        muon.step(given.lr * factor, 0.05)
        for group in adam.param_groups:
            group["lr"] = given.adam_lr * group["scale"] * factor
        adam.step()
        net.zero_grad(set_to_none=True)
        balance(net, BALANCE * max(factor, 0.1))
        step += 1
        facts = {"step": step, "tokens": step * given.batch * given.length, "share": share}
        if step % 10 == 0:
            print(f"{facts} loss {loss.item():.4f} {time.monotonic() - started:.0f}s", flush=True)
        if time.monotonic() - saved > SAVE_EVERY_S:
            saved = time.monotonic()
            held = evaluate(net, held_out, given.length, 64)
            print(f"{facts} held-out {held:.4f}", flush=True)
            save(net, given.out / "last.pt", facts)
    facts |= {"held_out": evaluate(net, held_out, given.length, 400), "arguments": str(given)}
    save(net, given.out / "final.pt", facts)
    print(facts, flush=True)


def _warm(run: Any, net: K3Nano, rows: Tensor) -> None:
    """One pass before the clock starts: compilation is not training."""
    _loss(run, rows).backward()
    net.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's learning rate")
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    train(given)


if __name__ == "__main__":
    main()
