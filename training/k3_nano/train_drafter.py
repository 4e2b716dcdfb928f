"""Trains the DSpark drafter on what k3-nano itself writes. Needs `interlock` to be installed.

    python train_drafter.py --documents docs.jsonl.gz --target FOLDER --minutes 12 --out FOLDER

The target continues prompts out of its training documents, mostly greedily, through the engine;
the drafter learns to propose those tokens from the target's hidden states. What is measured later
is greedy decoding, whose target distribution is a point mass on the token chosen: so the total
variation in DSpark's loss becomes one minus the probability of that token.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import drafter as dspark
import numpy as np
import tokenizer
import torch
from export import load_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from train import Muon, is_matrix, rate

from interlock.api import LLM
from interlock.engine.request import SamplingParams

PROMPT, CONTINUATION = (16, 64), 96
GREEDY_SHARE = 0.75
CE, TV, CONFIDENCE = 0.3, 0.7, 0.3


def prompts(documents: Path, folder: Path, count: int, seed: int) -> list[list[int]]:
    """Beginnings of windows of training documents."""
    rng = np.random.default_rng(seed)
    encoding = tokenizer.load(folder)
    found = [d for d in tokenizer.documents(documents) if not d["held_out"]]
    sizes = np.array([sum(len(text) for text, _ in d["parts"]) for d in found], dtype=float)
    chosen = rng.choice(len(found), count, p=sizes / sizes.sum())
    result = []
    for index in chosen:
        ids = tokenizer.encode(found[index]["parts"], encoding)
        length = int(rng.integers(*PROMPT))
        start = int(rng.integers(0, max(1, len(ids) - length - 32)))
        result.append(ids[start : start + length])
    return result


def continuations(target: Path, given: list[list[int]], seed: int) -> list[list[int]]:
    """What the target writes after each prompt, prompt included."""
    # Decoding is many small products: a second thread would only be waited for.
    options = {"max_model_len": 256, "max_num_seqs": 64, "max_waiting": len(given), "threads": 1}
    llm = LLM(str(target), dtype="float32", **options)
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=0.0 if rng.random() < GREEDY_SHARE else 0.7,
            max_tokens=CONTINUATION,
            ignore_eos=True,
            seed=index,
        )
        for index in range(len(given))
    ]
    answers = llm.generate(given, params)
    return [p + a.token_ids for p, a in zip(given, answers, strict=True)]


class Data:
    """Token ids [N, T], taps and final states of the target for all of them."""

    def __init__(self, sequences: list[list[int]], starts: list[int], target: Path) -> None:
        length = max(map(len, sequences))
        self.tokens = torch.zeros(len(sequences), length, dtype=torch.int64)
        for row, ids in enumerate(sequences):
            self.tokens[row, : len(ids)] = torch.tensor(ids)
        self.ends = torch.tensor([len(ids) for ids in sequences])
        self.starts = torch.tensor(starts)
        net = load_checkpoint(target, torch.float32)
        self.embed, self.head = net.embed_tokens.weight.detach(), net.lm_head.weight.detach()
        taps = tuple(dspark.CONFIG["target_layer_ids"])
        parts = []
        with torch.no_grad():
            for rows in self.tokens.split(32):
                tapped = net(rows, taps)[1]
                parts.append(torch.cat(tapped, -1).to(torch.bfloat16))
        self.taps = torch.cat(parts)

    def batch(self, rng: np.random.Generator, size: int, anchors: int) -> tuple[Tensor, ...]:
        """Rows, and anchors [size, A] whose eight next tokens the target has written."""
        rows = torch.from_numpy(rng.integers(0, len(self.tokens), size))
        low = self.starts[rows] - 1
        high = self.ends[rows] - dspark.CONFIG["num_speculative_tokens"] - 1
        share = torch.from_numpy(rng.random((size, anchors)))
        return rows, (low[:, None] + share * (high - low)[:, None]).long()


def loss_of(
    drafter: dspark.Drafter, data: Data, rows: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    width = dspark.CONFIG["num_speculative_tokens"]
    tokens = data.tokens[rows]
    where = anchors[..., None] + torch.arange(width + 1)
    window = tokens.gather(1, where.flatten(1)).view(where.shape)
    before, labels = window[..., :-1], window[..., 1:]
    context = drafter.context(data.taps[rows].float())
    states = drafter.hidden(context, anchors, window[..., 0], data.embed)
    logits = states @ data.head.T + drafter.markov(before)
    log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    right = logits.argmax(-1) == labels
    weight = torch.exp(-torch.arange(width) / width)
    text = ((CE * -log_probs + TV * (1 - log_probs.exp())) * weight).mean()
    sure = drafter.confidence(states.detach(), before)
    alive = right.float().cumprod(-1).roll(1, -1)
    alive[..., 0] = 1.0
    trust = F.binary_cross_entropy_with_logits(sure, right.float(), reduction="none")
    return text + CONFIDENCE * (trust * alive).sum() / alive.sum(), right.float().cumprod(-1).sum(
        -1
    ).mean()


def train(given: argparse.Namespace) -> dspark.Drafter:
    torch.manual_seed(given.seed)
    begun = time.monotonic()
    asked = prompts(given.documents, given.target, given.prompts, given.seed)
    written = continuations(given.target, asked, given.seed)
    torch.set_num_threads(given.threads)
    print(f"{sum(map(len, written))} tokens written in {time.monotonic() - begun:.0f}s", flush=True)
    data = Data(written, [len(p) for p in asked], given.target)
    print(f"taps after {time.monotonic() - begun:.0f}s", flush=True)
    net = dspark.Drafter(dspark.CONFIG)
    matrices = [p for n, p in net.named_parameters() if is_matrix(n, p) and "markov" not in n]
    ids = {id(p) for p in matrices}
    muon = Muon(matrices)
    adam = torch.optim.AdamW([p for p in net.parameters() if id(p) not in ids], betas=(0.9, 0.95))
    rng, started, step, share = np.random.default_rng(given.seed), time.monotonic(), 0, 0.0
    while share < 1.0:
        share = (time.monotonic() - started) / (60 * given.minutes)
        loss, accepted = loss_of(net, data, *data.batch(rng, given.batch, given.anchors))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        muon.step(given.lr * rate(share), 0.05)
        adam.param_groups[0]["lr"] = 3e-3 * rate(share)
        adam.step()
        net.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            print(f"step {step} {share:.2f} loss {loss:.3f} accepted {accepted:.2f}", flush=True)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("documents", "target", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    dspark.save(train(given), given.out)


if __name__ == "__main__":
    main()
