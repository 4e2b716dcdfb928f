"""Where a model keeps its chat template, and the variables that the template expects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.errors import WeightsError
from interlock.weights.fields import read_object
from interlock.weights.gguf_header import read_header

if TYPE_CHECKING:
    from interlock.weights.resolve import ModelFiles


def find_template(files: ModelFiles) -> str | None:
    """The default template of a model, or None if it has none."""
    if files.kind == "gguf":
        template = read_header(files.path).get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None
    return _in_folder(files.path)


def _in_folder(folder: Path) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{jinja}: cannot be read ({error})") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = _choose(read_object(path).get("chat_template")) if path.is_file() else None
        if found:
            return found
    return None


def _choose(value: Any) -> str | None:
    """A template, or the one called ``default`` out of a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) and value else None


def template_variables(files: ModelFiles) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ``pad_token`` and ``unk_token``; absent ones are empty."""
    from interlock.tokenizer import SpecialTokens, special_tokens, tokenizer_settings

    if files.kind != "gguf":
        return special_tokens(tokenizer_settings(files.path)).as_variables()
    header = read_header(files.path)
    tokens = header.items("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}

    def text(key: str) -> str | None:
        index = header.get(f"tokenizer.ggml.{key}_token_id")
        known = isinstance(index, int) and 0 <= index < len(tokens)
        return str(tokens[index]) if known else None

    return SpecialTokens(**{name: text(key) for name, key in names.items()}).as_variables()
