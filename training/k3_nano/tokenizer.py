"""The vocabulary: byte-level BPE in tiktoken's format, with K3's split pattern and specials.

python tokenizer.py --documents docs.jsonl.gz --out FOLDER
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from interlock.weights.tokenizer_tiktoken import PATTERN

SIZE = 4096
RESERVED = 64
# K3's special tokens, by their distance from the first one.
NAMED = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": RESERVED - 2,
    "[PAD]": RESERVED - 1,
}
MASK = SIZE + RESERVED - 3
VOCAB_SIZE = SIZE + RESERVED


def specials() -> dict[str, int]:
    """Every reserved id with its name; unnamed ones are called by their number, as in K3."""
    names = {SIZE + offset: name for name, offset in NAMED.items()}
    ids = range(SIZE, SIZE + RESERVED)
    return {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}


def train(texts: Iterator[str]) -> dict[bytes, int]:
    """Ranks of ``SIZE`` tokens: the bytes in order, then the merges in order."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    table = _bytes_of_characters()
    tokens = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merged = [b"".join(table[c] for c in token) for token, _ in tokens if len(token) > 1]
    ranked = [*(bytes((i,)) for i in range(256)), *merged]
    assert len(ranked) == len(set(ranked)) == SIZE, len(ranked)
    return {token: rank for rank, token in enumerate(ranked)}


def _bytes_of_characters() -> dict[str, bytes]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes((byte,)) for byte in printable}
    return table | {chr(0x100 + i): bytes((byte,)) for i, byte in enumerate(others)}


def save(ranks: dict[bytes, int], folder: Path) -> None:
    """``tiktoken.model`` and the part of ``tokenizer_config.json`` that names the specials."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(SIZE + o): {"content": name, "special": True} for name, o in NAMED.items()}
    config = {
        "added_tokens_decoder": dict(sorted(added.items())),
        "additional_special_tokens": list(NAMED),
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        # Few of its training chats think, so it does so only when asked to.
        "default_chat_template_kwargs": {"thinking": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path) -> tiktoken.Encoding:
    """The tokenizer as the tiktoken library runs it."""
    ranks = {}
    for line in (folder / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        "k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials()
    )


def encode(parts: list[list[object]], encoding: tiktoken.Encoding) -> list[int]:
    """Token ids of a document: each segment by itself, control tokens from control segments."""
    table = specials()
    ids: list[int] = []
    for text, control in parts:
        ids += [table[str(text)]] if control else encoding.encode_ordinary(str(text))
    return ids


def documents(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = [d for d in documents(given.documents) if not d["held_out"]]
    texts = (text for d in found for text, control in d["parts"] if not control)
    save(train(texts), given.out)


if __name__ == "__main__":
    main()
