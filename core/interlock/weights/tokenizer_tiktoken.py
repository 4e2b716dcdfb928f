"""Vocabularies in tiktoken's format with Kimi's split pattern, run by the tiktoken library.

A folder has ``tiktoken.model`` (base64 of a token's bytes, a space, its rank, per line), and
``tokenizer_config.json`` names the special tokens behind the ranks. Reserved ids without a name are
special too, and are called by their number.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interlock.errors import WeightsError
from interlock.tokenizer import SpecialTokens, Tokenizer, special_tokens, well_formed
from interlock.weights.config_hf import token_facts
from interlock.weights.fields import read_object
from interlock.xtml import CLOSE, OPEN

if TYPE_CHECKING:
    import tiktoken

FILE: Final = "tiktoken.model"
# Kimi K2's pattern: Han characters by themselves, words without them, numbers by three digits.
PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The library's regular expressions overflow on longer runs; Kimi's own tokenizer cuts there too.
MAX_CHARACTERS: Final = 400_000
MAX_RUN: Final = 25_000
_MAX_VOCABULARY: Final = 1 << 22


class TiktokenTokenizer(Tokenizer):
    """A `Tokenizer` on a tiktoken encoding. Safe to use from several threads."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        specials: dict[str, int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        special_tokens: SpecialTokens,
    ) -> None:
        self._encoding = encoding
        self._names = {index: name for name, index in specials.items()}
        self._size = encoding.n_vocab
        self.vocab_size = max(vocab_size, self._size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        # Kimi's prompts begin without one, raw ones as well as chats.
        self.add_bos = False
        self.special_ids = frozenset(self._names)
        self.special_tokens = special_tokens

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``; see `Tokenizer.encode`."""
        del add_special_tokens
        ids: list[int] = []
        for piece in pieces(well_formed(text)):
            if parse_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token give nothing."""
        parts = [self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def id_to_token(self, id: int) -> str | None:
        """The token's text, U+FFFD for bytes that are none; None for an id without a token."""
        if id in self._names:
            return self._names[id]
        return self.token_bytes(id).decode("utf-8", "replace") if self._known(id) else None

    def token_id(self, name: str) -> int | None:
        """The id of the special token called ``name``."""
        return next((index for index, text in self._names.items() if text == name), None)

    def visible(self, *, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """As `Tokenizer.visible`; what stands inside a tag is hidden with the tag's brackets.

        So a stop string is found in what a reader sees, and not in the name of a channel.
        """
        if not skip_special_tokens:
            return self.token_bytes
        inside = False

        def bytes_of(token: int) -> bytes:
            nonlocal inside
            name = self._names.get(token)
            if name is not None:
                inside = name in (OPEN, CLOSE)
            return b"" if inside or name is not None else self.token_bytes(token)

        return bytes_of

    def token_bytes(self, id: int, *, skip_special_tokens: bool = False) -> bytes:
        """The exact bytes that a token adds to a text."""
        if id in self._names:
            return b"" if skip_special_tokens else self._names[id].encode()
        return self._encoding.decode_single_token_bytes(id) if self._known(id) else b""

    def _known(self, id: int) -> bool:
        return 0 <= id < self._size


def pieces(text: str) -> Iterator[str]:
    """``text`` in parts without runs that the library cannot take; usually just one."""
    for start in range(0, len(text), MAX_CHARACTERS):
        yield from _short_runs(text[start : start + MAX_CHARACTERS])


def _short_runs(text: str) -> Iterator[str]:
    begin, run, space = 0, 0, False
    for index, character in enumerate(text if len(text) > MAX_RUN else ""):
        run = run + 1 if character.isspace() == space else 1
        space = character.isspace()
        if run > MAX_RUN:
            yield text[begin:index]
            begin, run = index, 1
    if begin < len(text):
        yield text[begin:]


def load(folder: Path) -> TiktokenTokenizer:
    """The tokenizer of a folder. Raises `WeightsError` naming the file and the line."""
    import tiktoken

    ranks = read_ranks(folder / FILE)
    settings = _settings(folder)
    facts = token_facts(folder)
    specials = _specials(settings, len(ranks), facts.vocab_size, folder)
    try:
        encoding = tiktoken.Encoding(
            folder.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
    except Exception as error:  # the library's Rust part raises several kinds
        raise WeightsError(f"{folder / FILE} makes no vocabulary: {error}") from error
    return TiktokenTokenizer(
        encoding,
        specials,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id,
        special_tokens=special_tokens(settings),
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks 0 to n - 1 of a ``tiktoken.model``, every single byte among them."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            token, rank = _parse(path, number, line)
            ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise WeightsError(f"{path}: ranks must be 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise WeightsError(f"{path}: byte {missing[0]} has no token, so not every text has one")
    return ranks


def _parse(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    try:
        token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
    except (ValueError, IndexError, binascii.Error):
        token, rank = b"", -1
    if len(fields) != 2 or not token or not 0 <= rank < _MAX_VOCABULARY:
        raise WeightsError(f"{path}: line {number} is not a base64 token and its rank")
    return token, rank


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_object(path) if path.is_file() else {}


def _specials(
    settings: dict[str, Any], first: int, vocab_size: int, folder: Path
) -> dict[str, int]:
    """Names of all ids behind the ranks, as far as the embedding goes."""
    named: dict[int, str] = {}
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not str(key).isdecimal() or not isinstance(text, str) or not text:
            raise WeightsError(f"{where}: entry {key!r} is malformed")
        named[int(key)] = text
    ids = range(first, max([vocab_size, *(i + 1 for i in named)]))
    names = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
    if len(names) != len(ids) or any(i < first for i in named):
        raise WeightsError(f"{where} must name distinct tokens from id {first} on")
    return names
