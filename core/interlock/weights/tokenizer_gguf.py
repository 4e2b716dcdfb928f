"""A `tokenizers` tokenizer rebuilt from GGUF metadata.

Two kinds exist: byte-level BPE (``gpt2``), whose pre-tokenizer is named by ``tokenizer.ggml.pre``,
and SentencePiece BPE with byte fallback (``llama``), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from interlock.errors import WeightsError
from interlock.weights.gguf_header import GGUFHeader

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_MAX_PIECE: Final = 1024  # characters; splitting a longer one would take quadratic time
_SPACE: Final = "\u2581"  # SentencePiece writes spaces as this character

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{DIGITS}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION: Final = r"[\p{P}\$\+<=>\^~\|]+"


def _byte_level(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split at every pattern in turn, then write bytes as printable characters."""
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _byte_level(_WORDS.replace("DIGITS", "1,3")),
    "llama3": lambda: _byte_level(_WORDS.replace("DIGITS", "1,3")),
    "llama-v3": lambda: _byte_level(_WORDS.replace("DIGITS", "1,3")),
    "qwen2": lambda: _byte_level(_WORDS.replace("{DIGITS}", "")),
    "deepseek-r1-qwen": lambda: _byte_level(_WORDS.replace("{DIGITS}", "")),
    "tekken": lambda: _byte_level(_TEKKEN),
    "default": lambda: _byte_level(_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_WHOLE_WORDS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Pre-tokenizers whose words are looked up in the vocabulary before any merge is tried."""
ADD_BOS_BY_DEFAULT: Final = _WHOLE_WORDS


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """Raises `WeightsError` if the tokenizer is missing, damaged or of an unsupported kind."""
    kind = header.get("tokenizer.ggml.model")
    tokens = _tokens(header)
    if kind not in ("gpt2", "llama"):
        raise _error(header, f"tokenizer model {kind!r} is not supported (gpt2, llama)")
    build = _build_bpe if kind == "gpt2" else _build_sentencepiece
    try:
        tokenizer = build(header, tokens)
        _add_special(tokenizer, header, tokens)
    except WeightsError:
        raise
    except Exception as error:  # the library raises plain Exception for a bad vocabulary
        raise _error(header, f"its tokenizer is damaged: {error}") from error
    return tokenizer


def adds_bos(header: GGUFHeader) -> bool:
    """Whether plain text starts with BOS; older files leave it to the kind of tokenizer."""
    stated = header.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if header.get("tokenizer.ggml.model") == "llama":
        return True
    return str(header.get("tokenizer.ggml.pre", "default")) in ADD_BOS_BY_DEFAULT


def _tokens(header: GGUFHeader) -> list[str]:
    tokens = header.items("tokenizer.ggml.tokens")
    if not tokens or not isinstance(tokens[0], str):
        raise _error(header, "tokenizer.ggml.tokens is missing")
    return [_printable(token, index) for index, token in enumerate(tokens)]


def _printable(token: str, index: int) -> str:
    """The library takes valid Unicode only; a damaged token keeps its id under another name."""
    return token if token.isascii() or _is_unicode(token) else f"<invalid token {index}>"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    # Of equal tokens the first keeps the text; the others stay reachable by id only.
    return {token: index for index, token in reversed(list(enumerate(tokens)))}


def _build_bpe(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    pre = str(header.get("tokenizer.ggml.pre", "default"))
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise _error(header, f"pre-tokenizer {pre!r} is not supported; supported: {known}")
    merges = header.items("tokenizer.ggml.merges")
    if not merges:
        raise _error(header, "tokenizer.ggml.merges is missing")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocab(tokens),
            merges=[_split_merge(header, merge) for merge in merges],
            ignore_merges=pre in _WHOLE_WORDS,
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(header: GGUFHeader, merge: Any) -> tuple[str, str]:
    left, space, right = str(merge).partition(" ")
    if not (left and space and right):
        raise _error(header, f"tokenizer.ggml.merges holds {merge!r}, which isn't a pair")
    return left, right


def _build_sentencepiece(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    scores = header.items("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise _error(header, "tokenizer.ggml.scores is missing or too short")
    vocab = _vocab(tokens)
    unknown = header.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores, header.items("tokenizer.ggml.token_type")),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = header.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(
    vocab: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes up a token, the pair of the best-scored token first.

    SentencePiece always joins the neighbours whose union has the highest score, which is what a
    merge list ordered by that score does.
    """
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        if index < len(kinds) and kinds[index] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        if len(token) > _MAX_PIECE:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[index], vocab[left], vocab[right], left, right))
    pairs.sort()
    return [(left, right) for _, _, _, left, right in pairs]


def _add_special(tokenizer: Tokenizer, header: GGUFHeader, tokens: Sequence[str]) -> None:
    marked = list(zip(tokens, header.items("tokenizer.ggml.token_type"), strict=False))
    special = [t for t, kind in marked if kind in (_CONTROL, _UNKNOWN)]
    user = [t for t, kind in marked if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])


def _error(header: GGUFHeader, message: str) -> WeightsError:
    return WeightsError(f"{header.path}: {message}")
