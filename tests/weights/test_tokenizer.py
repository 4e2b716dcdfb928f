"""Tokenizers from GGUF metadata and from tokenizer.json: ids, bytes, special tokens, BOS."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest

import tinymodels
from interlock.errors import WeightsError
from interlock.tokenizer import Tokenizer
from interlock.weights.resolve import local_files
from interlock.weights.tokenizer_gguf import _PRE_TOKENIZERS

TEXTS = [
    "The capital of France is Paris, 12345 times.",
    "  two  spaces\n\n\ttabs\r\n",
    "Größe naïve café — “quotes” … ½ ²",
    "東京 Москва 🚀👩‍👩‍👧‍👦🇩🇪",
    "def f(x):\n    return x**2  # squares",
    "a" * 300,
    "",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module", params=["gguf", "hf"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "gguf":
        return Tokenizer.load(local_files(tinymodels.write_tiny_gguf(folder / "m.gguf")))
    return Tokenizer.load(local_files(tinymodels.write_tiny_hf(folder / "m")))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_exact_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == tinymodels.tiny_tokenizer().encode(text).ids
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_every_token_has_bytes_or_none(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes((value,)) for value in range(256)} <= singles
    assert tokenizer.vocab_size == 512
    for surplus in (500, 511, 512, -1, 2**40):
        assert tokenizer.id_to_token(surplus) is None
        assert tokenizer.token_bytes(surplus) == b""
    assert tokenizer.decode([500, 511, -1, 2**40]) == ""


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {tinymodels.IM_END}
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == tinymodels.IM_START
    assert ids[-1] == tinymodels.IM_END
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(tinymodels.IM_END) == b"<|im_end|>"
    assert tokenizer.token_bytes(tinymodels.IM_END, skip_special_tokens=True) == b""
    assert tokenizer.special_tokens.as_variables()["eos_token"] == "<|im_end|>"


def test_special_text_can_be_spelled_out(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    ids = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == text
    assert tinymodels.IM_END in tokenizer.encode(text)


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("x\ud800y")) == "x\ufffdy"
    # A surrogate pair in JSON is one character.
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude80")) == "🚀"


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_exactly_one_bos(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", add_bos=True)
    else:
        path = tinymodels.write_tiny_hf(tmp_path / "m")
        _change(path / "tokenizer_config.json", add_bos_token=True)
    tokenizer = Tokenizer.load(local_files(path))
    bos = tinymodels.IM_START
    assert (tokenizer.add_bos, tokenizer.bos_token_id) == (True, bos)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert bos not in plain
    assert tokenizer.encode("hello") == [bos, *plain]
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("", add_special_tokens=False) == []
    # Text that starts with BOS, as a rendered chat template does, gets no second one.
    assert tokenizer.encode("<|im_start|>hello") == [bos, *plain]
    assert tokenizer.encode("<|im_start|>hello", add_special_tokens=False) == [bos, *plain]
    # The user's own second BOS is the user's.
    assert tokenizer.encode("<|im_start|>" * 2) == [bos, bos]


def test_bos_of_the_post_processor(tmp_path: Path) -> None:
    from tokenizers import processors

    path = tinymodels.write_tiny_hf(tmp_path / "m")
    backend = tinymodels.tiny_tokenizer().from_str(tinymodels.tiny_tokenizer().to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tinymodels.IM_START)]
    )
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.load(local_files(path))
    assert tokenizer.add_bos
    assert tokenizer.encode("x")[0] == tinymodels.IM_START
    _change(path / "tokenizer_config.json", add_bos_token=False)
    assert not Tokenizer.load(local_files(path)).add_bos


def test_no_bos_tokenizer_encodes_nothing_as_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_eos_falls_back_to_the_tokenizer(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_hf(tmp_path / "m", config={"eos_token_id": None})
    assert Tokenizer.load(local_files(path)).eos_token_ids == {tinymodels.IM_END}


def test_end_of_turn_tokens_of_gguf(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 7}
    path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", metadata=keys)
    assert Tokenizer.load(local_files(path)).eos_token_ids == {tinymodels.IM_END, 7}


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_hf(tmp_path / "m")
    backend = tinymodels.tiny_tokenizer().from_str(tinymodels.tiny_tokenizer().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    text = "one two three four five six seven eight nine ten"
    tokenizer = Tokenizer.load(local_files(path))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll pay 1234!!", ["I", "'ll", " pay", " 1234", "!!"]),
        ("smollm", "I'll pay 1234!!", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!"]),
        ("llama-bpe", "I'LL pay 1234!!\n\nx", ["I", "'LL", " pay", " ", "123", "4", "!!\n\n", "x"]),
        ("qwen2", "pay 12\n x", ["pay", " ", "1", "2", "\n", " x"]),
        ("tekken", "fooBar 12/\n", ["foo", "Bar", " ", "1", "2", "/\n"]),
        ("default", "pay $1234", ["pay", " ", "$", "123", "4"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, words: list[str]) -> None:
    pieces = _PRE_TOKENIZERS[pre]().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    for keys, message in (
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported; supported"),
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer model 't5' is not supported \(gpt2, llama\)"),
    ):
        path = tinymodels.write_tiny_gguf(tmp_path / "m.gguf", metadata=keys)
        with pytest.raises(WeightsError, match=message):
            Tokenizer.load(local_files(path))


def test_missing_and_damaged_tokenizer_json(tmp_path: Path) -> None:
    path = tinymodels.write_tiny_hf(tmp_path / "m")
    whole = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"tokenizer\.json is damaged or cut short"):
        Tokenizer.load(local_files(path))
    (path / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json; convert"):
        Tokenizer.load(local_files(path))


# SentencePiece BPE -----------------------------------------------------------------------------

PIECES = [
    "he",
    "l",
    "ll",
    "llo",
    "hello",
    "wor",
    "world",
    "ld",
    "or",
    "ello",
    "lo",
    "an",
    "na",
    "ban",
]
SPACE = "\u2581"


def sentencepiece_file(path: Path, **metadata: Any) -> tuple[Path, dict[str, float]]:
    """A file with byte tokens, letters and ``PIECES`` (with and without a leading space)."""
    pieces = PIECES + [SPACE + piece for piece in PIECES] + [SPACE * 2]
    letters = sorted(set("".join(pieces)))
    words = [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    scores = {piece: -float(index) for index, piece in enumerate(words)}
    scores |= {letter: -1000.0 - index for index, letter in enumerate(letters)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *scores]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(scores)
    writer = gguf.GGUFWriter(path, "llama")
    tinymodels._add_sizes(writer, tinymodels.TinySpec())
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(scores.values()))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    weights = tinymodels.tiny_weights(tinymodels.TinySpec())
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, scores


def brute_force(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: join the neighbours whose union scores highest, leftmost first."""
    pieces = list((SPACE + text).replace(" ", SPACE))
    while True:
        unions = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        known = [(score, index) for score, index in unions if score is not None]
        if not known:
            return pieces
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    path, scores = sentencepiece_file(tmp_path / "m.gguf")
    tokenizer = Tokenizer.load(local_files(path))
    rng = random.Random(0)
    for _ in range(200):
        words = rng.choices(["hello", "world", "banana", "llorld", "heo", "", "ban"], k=4)
        text = rng.choice([" ", ""]).join(words)
        if not text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.id_to_token(i) for i in ids] == brute_force(text, scores)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == f" {text}".encode()


def test_sentencepiece_byte_fallback_and_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(local_files(sentencepiece_file(tmp_path / "m.gguf")[0]))
    ids = tokenizer.encode("hello é🚀")
    assert ids[0] == 1
    assert [tokenizer.id_to_token(i) for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"]
    assert tokenizer.token_bytes(ids[-1]) == b"\x80"
    assert tokenizer.decode(ids) == "hello é🚀"
    assert b"".join(tokenizer.token_bytes(i) for i in ids[1:]) == " hello é🚀".encode()
    assert tokenizer.encode("<s>hello")[:2].count(1) == 1


def test_sentencepiece_without_prefix(tmp_path: Path) -> None:
    path, _ = sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.load(local_files(path))
    ids = tokenizer.encode("hello")
    assert [tokenizer.id_to_token(i) for i in ids] == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
