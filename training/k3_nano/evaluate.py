"""Held-out figures of k3-nano and its drafter: bits per byte, and greedy acceptance length.

    python evaluate.py                          # recompute and compare with figures.json
    python evaluate.py --documents docs.jsonl.gz --write    # the baseline too; writes the figures

Bits per byte: all tokens of a held-out document but its first, in windows of 512 tokens, over the
bytes of its text. Acceptance length: tokens per verification step, the target's own one included,
while the target continues held-out prompts greedily and the drafter proposes eight tokens a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import drafter as dspark
import numpy as np
import tokenizer
import torch
from export import load_checkpoint
from ngram import KneserNey

from interlock.api import LLM
from interlock.engine.request import SamplingParams

HERE = Path(__file__).parent
ASSETS = HERE.parent.parent / "core" / "interlock" / "assets"
HELD_OUT = HERE / "heldout.jsonl.gz"
FIGURES = HERE / "figures.json"
WINDOW, PROMPT, CONTINUATION, PER_SOURCE = 512, 48, 96, 16
TOLERANCE = {"bits_per_byte": 0.005, "acceptance_length": 0.05}


def bytes_of(document: dict[str, Any]) -> int:
    return sum(len(text.encode()) for text, control in document["parts"] if not control)


def nats(net: Any, ids: np.ndarray) -> float:
    """Negative log-likelihood of all tokens but the first."""
    total = 0.0
    for start in range(0, len(ids) - 1, WINDOW):
        window = torch.from_numpy(ids[start : start + WINDOW + 1])[None]
        with torch.no_grad():
            logits = net.logits(window[:, :-1])[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return total


def summed(parts: list[tuple[str, float, float]]) -> dict[str, float]:
    """Quotients of two sums, by source and in total."""
    groups: dict[str, list[float]] = {}
    for source, above, below in parts:
        for name in (source, "total"):
            sums = groups.setdefault(name, [0.0, 0.0])
            sums[0] += above
            sums[1] += below
    return {name: round(above / below, 4) for name, (above, below) in groups.items()}


def prompts(documents: list[dict[str, Any]], encoding: Any) -> list[tuple[str, list[int]]]:
    """The beginnings of the first held-out documents of each source; of chats, the question."""
    chosen: dict[str, list[list[int]]] = {}
    for document in documents:
        ids = tokenizer.encode(document["parts"], encoding)
        if document["source"].endswith("chat"):
            close = encoding.encode("<|end_of_msg|>", allowed_special="all")[0]
            ids = [*ids[: ids.index(close) + 1], *_opening(encoding)]
        found = chosen.setdefault(document["source"], [])
        if len(found) < PER_SOURCE:
            found.append(ids[:PROMPT])
    return [(source, ids) for source, found in chosen.items() for ids in found]


def _opening(encoding: Any) -> list[int]:
    from data import opened

    parts = [*opened("message", role="assistant"), *opened("response")]
    return tokenizer.encode([list(part) for part in parts], encoding)


def acceptance(folder: Path, draft: Path, asked: list[tuple[str, list[int]]]) -> dict[str, float]:
    llm = LLM(str(folder), dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=CONTINUATION, ignore_eos=True)
    written = llm.generate([ids for _, ids in asked], params)
    net, drafter = load_checkpoint(folder, torch.float32), dspark.load(draft)
    embed, head = net.embed_tokens.weight.detach(), net.lm_head.weight.detach()
    parts = []
    for (source, prompt), answer in zip(asked, written, strict=True):
        ids = [*prompt, *answer.token_ids]
        with torch.no_grad():
            taps = net(torch.tensor([ids]), tuple(drafter.c["target_layer_ids"]))[1]
            context = drafter.context(torch.cat(taps, -1)[0])
        # The target's own first token is no step of the drafter's.
        place, steps = len(prompt), 0
        while place < len(ids) - 1:
            drafts = drafter.propose(context, place, ids[place], embed, head)
            place += 1 + agreeing(drafts, ids[place + 1 :])
            steps += 1
        parts.append((source, place - len(prompt), steps))
    return summed(parts)


def agreeing(drafts: list[int], tokens: list[int]) -> int:
    pairs = list(zip(drafts, tokens, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def measure(folder: Path, draft: Path) -> dict[str, Any]:
    encoding = tokenizer.load(folder)
    documents = tokenizer.documents(HELD_OUT)
    net = load_checkpoint(folder, torch.float32)
    parts = []
    for document in documents:
        ids = np.array(tokenizer.encode(document["parts"], encoding))
        parts.append((document["source"], nats(net, ids) / np.log(2), float(bytes_of(document))))
    asked = prompts(documents, encoding)
    return {
        "bits_per_byte": summed(parts),
        "acceptance_length": acceptance(folder, draft, asked),
        "prompts": len(asked),
    }


def baseline(documents: Path, folder: Path) -> dict[str, float]:
    """Bits per byte of the 5-gram model of the same training documents."""
    encoding = tokenizer.load(folder)
    found = [d for d in tokenizer.documents(documents) if not d["held_out"]]
    model = KneserNey([np.array(tokenizer.encode(d["parts"], encoding)) for d in found])
    parts = []
    for document in tokenizer.documents(HELD_OUT):
        ids = np.array(tokenizer.encode(document["parts"], encoding))
        bits = -float(model.log_probs(ids).sum()) / np.log(2)
        parts.append((document["source"], bits, float(bytes_of(document))))
    return summed(parts)


def write_held_out(documents: Path) -> None:
    found = [d for d in tokenizer.documents(documents) if d["held_out"]]
    lines = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in found)
    # No time stamp: the same documents give the same file.
    HELD_OUT.write_bytes(gzip.compress(lines.encode(), mtime=0))


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    return [
        f"{kind} of {name}: {value} instead of {recorded[kind][name]}"
        for kind, tolerance in TOLERANCE.items()
        for name, value in found[kind].items()
        if abs(value - recorded[kind][name]) > tolerance
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ASSETS / "k3-nano")
    parser.add_argument("--drafter", type=Path, default=ASSETS / "k3-nano-dspark")
    parser.add_argument("--documents", type=Path, help="all documents, for the baseline")
    parser.add_argument("--write", action="store_true", help="record what is found")
    given = parser.parse_args()
    if given.documents and given.write:
        write_held_out(given.documents)
    found = measure(given.model, given.drafter)
    if given.documents:
        found["baseline_bits_per_byte"] = baseline(given.documents, given.model)
    print(json.dumps(found, indent=1))
    if given.write:
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    wrong = differences(found, json.loads(FIGURES.read_text()))
    print("\n".join(wrong) or "as recorded", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
