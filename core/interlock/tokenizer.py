"""Text to token ids and back, from GGUF metadata or a tokenizer.json. Imports no torch.

Begin-of-sequence rule: `encode` puts exactly one BOS in front if the model wants one and
``add_special_tokens`` is set; text that already starts with BOS, as rendered chat templates do,
gets no second one. Chat prompts are encoded with ``add_special_tokens=False``, because the
template alone decides about BOS.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from interlock.errors import WeightsError
from interlock.weights.config import load_config
from interlock.weights.config_hf import token_facts
from interlock.weights.fields import read_object

if TYPE_CHECKING:
    import tokenizers

    from interlock.weights.resolve import ModelFiles

Scheme = Literal["byte_level", "byte_fallback", "plain"]
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE: Final = "\u2581"


@attrs.frozen(kw_only=True)
class SpecialTokens:
    """Texts of the special tokens, as chat templates know them."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None

    def as_variables(self) -> dict[str, str]:
        return {f"{name}_token": text or "" for name, text in attrs.asdict(self).items()}


class Tokenizer:
    """A tokenizer with the ids and rules of its model. Safe to use from several threads.

    ``vocab_size`` counts the embedding rows of the model where they exceed the tokenizer's own
    tokens; the surplus ids have no text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        add_bos: bool,
        special_tokens: SpecialTokens | None = None,
    ) -> None:
        self._backend = backend
        self._size: int = backend.get_vocab_size(with_added_tokens=True)
        self._added = backend.get_added_tokens_decoder()
        self._scheme = _scheme(backend)
        self.vocab_size = max(vocab_size, self._size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.special_tokens = special_tokens or SpecialTokens()

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """Raises `WeightsError` if the tokenizer is missing, damaged or unsupported."""
        if files.kind == "gguf":
            return _from_gguf(files)
        from interlock.weights import tokenizer_tiktoken

        # A converted tokenizer.json beside it wins: whoever made it wants it.
        plain = (files.path / "tokenizer.json").is_file()
        if not plain and (files.path / tokenizer_tiktoken.FILE).is_file():
            return tokenizer_tiktoken.load(files.path)
        return _from_folder(files)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        With ``parse_special`` the text of a special token in the input becomes that token;
        without it, it is spelled out, so that users cannot inject control tokens.
        """
        backend = self._backend if parse_special else self._literal_backend
        # The batch call lets other threads run meanwhile; the plain one holds the interpreter.
        (encoding,) = backend.encode_batch_fast([well_formed(text)], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token (padding rows of the embedding) give nothing."""
        known = [i for i in ids if 0 <= i < self._size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def save(self, path: Path) -> None:
        """Write Hugging Face's ``tokenizer.json``."""
        path.write_text(self._backend.to_str(pretty=False), encoding="utf-8")

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id without one."""
        if not 0 <= id < self._size:
            return None
        token: str | None = self._backend.id_to_token(id)
        return token

    def token_id(self, name: str) -> int | None:
        """The id of the token that the vocabulary spells ``name``."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def visible(self, *, skip_special_tokens: bool) -> Callable[[int], bytes]:
        """What the tokens of one text show, asked for in their order: see `token_bytes`."""
        return functools.partial(self.token_bytes, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int, *, skip_special_tokens: bool = False) -> bytes:
        """The exact bytes that a token adds to a text.

        Bytes of consecutive tokens concatenate to the UTF-8 text, where one character may be
        spread over several tokens. A special token gives its text, or nothing if it is skipped.
        """
        if skip_special_tokens and id in self.special_ids:
            return b""
        token = self.id_to_token(id)
        if token is None:
            return b""
        if id in self._added:
            return token.encode()
        return _token_bytes(token, self._scheme)


def _token_bytes(token: str, scheme: Scheme) -> bytes:
    if scheme == "byte_level":
        table = _byte_of_character()
        return b"".join(bytes((table[c],)) if c in table else c.encode() for c in token)
    if scheme == "byte_fallback":
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes((int(match[1], 16),))
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
    return token.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Inverse of byte-level BPE's alphabet.

    Printable Latin-1 stands for itself, the other bytes follow from U+0100 on in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def well_formed(text: str) -> str:
    """JSON may carry lone surrogates, which no UTF-8 text can; they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _scheme(backend: tokenizers.Tokenizer) -> Scheme:
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    if '"ByteLevel"' in decoder:
        return "byte_level"
    return "byte_fallback" if '"ByteFallback"' in decoder else "plain"


def _from_gguf(files: ModelFiles) -> Tokenizer:
    from interlock.weights.gguf_header import read_header
    from interlock.weights.tokenizer_gguf import adds_bos, build_tokenizer

    header = read_header(files.path)
    config = load_config(files)
    backend = build_tokenizer(header)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    texts = {name: _text_of(backend, token) for name, token in ids.items()}
    return Tokenizer(
        backend,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        add_bos=adds_bos(header),
        special_tokens=SpecialTokens(**texts),
    )


def _text_of(backend: tokenizers.Tokenizer, token: object) -> str | None:
    if not isinstance(token, int) or not 0 <= token < backend.get_vocab_size():
        return None
    text: str | None = backend.id_to_token(token)
    return text


def _from_folder(files: ModelFiles) -> Tokenizer:
    config = token_facts(files.path)
    backend = _read_tokenizer_json(files.path)
    settings = tokenizer_settings(files.path)
    special = special_tokens(settings)
    bos_id = backend.token_to_id(special.bos) if special.bos else config.bos_token_id
    eos_ids = config.eos_token_ids
    if not eos_ids and special.eos:
        eos_ids = tuple(i for i in (backend.token_to_id(special.eos),) if i is not None)
    return Tokenizer(
        backend,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_ids,
        bos_token_id=bos_id,
        add_bos=_adds_bos(backend, settings, bos_id),
        special_tokens=special,
    )


def _read_tokenizer_json(folder: Path) -> tokenizers.Tokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(
            f"{folder} has no tokenizer.json; convert its tokenizer with transformers "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path} is damaged or cut short: {error}") from error
    # A length limit for training must not cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json below tokenizer_config.json; files that don't exist add nothing."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= {k: v for k, v in read_object(folder / name).items() if v is not None}
    return settings


def special_tokens(settings: dict[str, Any]) -> SpecialTokens:
    def text(name: str) -> str | None:
        value = settings.get(f"{name}_token")
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    return SpecialTokens(bos=text("bos"), eos=text("eos"), pad=text("pad"), unk=text("unk"))


def _adds_bos(backend: tokenizers.Tokenizer, settings: dict[str, Any], bos_id: int | None) -> bool:
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bos_id is not None and bos_id in backend.encode("", add_special_tokens=True).ids
