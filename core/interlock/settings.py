"""Settings: one frozen attrs class per section, values from defaults, a TOML file, flags and --set.

Later sources win: default < configuration file < flag < ``--set``. Every key that is given is
applied or is an error; each value remembers where it came from. Nobody rewrites a section after
`load_settings` has returned. This module imports no torch.
"""

from __future__ import annotations

import difflib
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
from attrs import validators as v

from interlock.errors import ConfigError, PluginError

DType = Literal["auto", "bfloat16", "float32", "float64"]


def option(default: Any, help: str, validator: Any = None) -> Any:
    """An attrs field with a help text, which tables and documentation show."""
    return attrs.field(default=default, metadata={"help": help}, validator=validator)


_positive = v.optional(v.ge(1))


def _no_empty_key(_: Any, field: attrs.Attribute[Any], keys: tuple[str, ...]) -> None:
    # As in --api-key "$UNSET": it would let in everybody who sends an empty key.
    if any(not key.strip() for key in keys):
        raise ValueError(f"'{field.name}' must not be empty; leave it out to ask for no key")


@attrs.frozen(kw_only=True)
class EngineSettings:
    model: str = option("smollm2-135m", "alias, local folder, .gguf file or hub name")
    served_model_name: str | None = option(None, "the name that clients use (default: the model's)")
    dtype: DType = option("auto", "bfloat16 where the CPU multiplies it itself, else float32")
    device: str = option("auto", "cpu, cuda or cuda:N; auto takes a GPU if there is one")
    max_model_len: int | None = option(None, "longest sequence in tokens", _positive)
    block_size: int = option(16, "tokens per KV block", [v.ge(1), v.le(1024)])
    num_blocks: int | None = option(None, "KV blocks (default: from kv_cache_bytes)", _positive)
    kv_cache_bytes: int | None = option(
        None, "bytes for the KV cache (default: part of the free memory)", _positive
    )
    num_states: int | None = option(
        None,
        "recurrent state slots, if the model has states (default: max_num_seqs)",
        _positive,
    )
    max_num_seqs: int = option(64, "sequences that run at once", v.ge(1))
    max_num_batched_tokens: int = option(1024, "tokens computed in one step", v.ge(1))
    max_waiting: int = option(512, "queued sequences; more are answered 429", v.ge(1))
    max_waiting_tokens: int | None = option(None, "queued prompt tokens, likewise", _positive)
    request_timeout_s: float | None = option(None, "deadline of every request", v.optional(v.gt(0)))
    tp: int = option(1, "tensor parallel ranks, one process each", [v.ge(1), v.le(1024)])
    collective_timeout_s: float = option(
        300.0, "a collective that takes longer has lost a rank", v.gt(0)
    )
    threads: int | None = option(
        None, "CPU threads for torch (default: all cores)", v.optional([v.ge(1), v.le(1024)])
    )
    batch_invariant: bool | None = option(
        None, "true: one kernel for all rows; false: fastest; none: as the CPU's kernels allow"
    )
    chat_template: str | None = option(None, "file with a Jinja template instead of the model's")
    trace_hooks: bool = option(False, "print every hook call to stderr (slow)")


@attrs.frozen(kw_only=True)
class ServerSettings:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", [v.ge(0), v.le(65535)])
    api_key: tuple[str, ...] = option((), "accepted keys; none: no key is asked for", _no_empty_key)
    max_body_bytes: int = option(16 * 2**20, "largest request body", v.ge(1024))
    max_n: int = option(64, "largest n of a request", v.ge(1))
    max_prompts: int = option(128, "most prompts in one request", v.ge(1))
    shutdown_timeout_s: float = option(30.0, "time for running requests after SIGTERM", v.ge(0))
    exit_after_s: float = option(
        5.0, "time to answer 503 once the engine process has died, before exiting", v.ge(0)
    )
    stall_timeout_s: float = option(30.0, "without progress for this long is not ready", v.gt(0))
    metrics_without_key: bool = option(False, "serve /metrics without a key")
    salt_by_key: bool = option(
        False, "requests with different API keys share nothing that is cached"
    )
    http_workers: int = option(1, "HTTP processes", v.ge(1))


CORE_SECTIONS: dict[str, type[Any]] = {"engine": EngineSettings, "server": ServerSettings}


@attrs.frozen(kw_only=True)
class Settings:
    """The whole configuration. ``sections`` holds each plugin's own settings by plugin name."""

    engine: EngineSettings = attrs.field(factory=EngineSettings)
    server: ServerSettings = attrs.field(factory=ServerSettings)
    plugins: tuple[str, ...] = ()
    sections: Mapping[str, Any] = attrs.field(factory=dict)
    sources: Mapping[str, str] = attrs.field(factory=dict)

    def section(self, name: str) -> Any:
        """The settings object of section ``name`` (``engine``, ``server`` or a plugin)."""
        if name in CORE_SECTIONS:
            return getattr(self, name)
        return self.sections[name]

    def source(self, key: str) -> str:
        return self.sources.get(key, "default")


class _Given(typing.NamedTuple):
    key: str
    value: Any
    source: str


def load_settings(
    plugins: Sequence[str] | None = None,
    config_file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> Settings:
    """Build the settings from all sources.

    ``plugins`` is the exact list and order; None takes the file's list, or no plugin at all.
    ``flags`` maps ``section.key`` to values (None: not given); ``sets`` is ``section.key=value``.
    Raises ConfigError naming the key, PluginError for a plugin that cannot be loaded.
    """
    document = _read_toml(config_file) if config_file else {}
    given = [*_from_toml(document, config_file), *_from_flags(flags or {}), *_from_sets(sets)]
    names = tuple(plugins) if plugins is not None else _plugins_of(document)
    section_types = {**CORE_SECTIONS, **_plugin_sections(names)}
    values, sources = _collect(given, section_types)
    built = {name: _build(name, kind, values[name]) for name, kind in section_types.items()}
    core = {name: built.pop(name) for name in CORE_SECTIONS}
    return Settings(plugins=names, sections=built, sources=sources, **core)


def _plugin_sections(names: Sequence[str]) -> dict[str, type[Any]]:
    if not names:
        return {}
    from interlock.plugins import Plugins

    for name in names:
        if name in (*CORE_SECTIONS, "plugins"):
            raise PluginError(
                f"plugin {name!r} has the name of a section of the core: rename its entry point"
            )
    return Plugins.load(names).setting_types()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None


def _plugins_of(document: Mapping[str, Any]) -> tuple[str, ...]:
    names = document.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ConfigError('plugins: a list of names is expected, as in plugins = ["a", "b"]')
    return tuple(names)


def _from_toml(document: Mapping[str, Any], path: Path | None) -> Iterable[_Given]:
    for name, table in document.items():
        if name == "plugins":
            continue
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name}: a table [{name}] is expected, not a plain value")
        for key, value in table.items():
            yield _Given(f"{name}.{key}", value, f"file {path}")


def _from_flags(flags: Mapping[str, Any]) -> Iterable[_Given]:
    return (_Given(key, value, "flag") for key, value in flags.items() if value is not None)


def _from_sets(sets: Sequence[str]) -> Iterable[_Given]:
    for text in sets:
        key, separator, value = text.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {text}: write it as section.key=value")
        yield _Given(key.strip(), value, "--set")


def _collect(
    given: Iterable[_Given], section_types: Mapping[str, type[Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    values: dict[str, dict[str, Any]] = {name: {} for name in section_types}
    sources: dict[str, str] = {}
    for key, value, source in given:
        section, _, name = key.partition(".")
        if section not in section_types:
            message = _unknown(source, f"section {section!r}", section, section_types)
            raise ConfigError(f"{message} (a plugin's section needs the plugin in --plugins)")
        hints = typing.get_type_hints(section_types[section])
        if name not in hints:
            raise ConfigError(_unknown(source, f"setting {key!r}", name, hints, section + "."))
        values[section][name] = convert(key, value, hints[name])
        sources[key] = source
    return values, sources


def _unknown(source: str, what: str, name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    if near:
        hint = "did you mean " + " or ".join(prefix + n for n in near) + "?"
    else:
        hint = "known: " + ", ".join(prefix + n for n in sorted(known))
    return f"{source}: unknown {what}; {hint}"


def convert(key: str, value: Any, hint: Any) -> Any:
    """``value`` as type ``hint``; text is parsed (``true``, ``8``, ``none``, ``a,b``)."""
    if isinstance(value, str) and value.lower() in ("none", "null"):
        value = None if type(None) in typing.get_args(hint) else value
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = [part for part in value.split(",") if part]
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        given = f"(given: {str(value)[:100]!r})"
        if typing.get_origin(hint) is Literal:
            known = ", ".join(map(str, typing.get_args(hint)))
            raise ConfigError(f"{key}: must be one of {known} {given}") from None
        raise ConfigError(f"{key}: {str(error)[:300]} {given}") from None


def _build(name: str, kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        message = error.args[0] if error.args else str(error)
        raise ConfigError(f"{name}: {message}") from None


def describe(settings: Settings) -> dict[str, dict[str, dict[str, Any]]]:
    """Every setting with value, default, source and help, by section."""
    sections = {**CORE_SECTIONS, **{n: type(s) for n, s in settings.sections.items()}}
    return {name: _describe(settings, name, kind) for name, kind in sections.items()}


def _describe(settings: Settings, name: str, kind: type[Any]) -> dict[str, dict[str, Any]]:
    section = settings.section(name)
    secret = ("api_key",)
    return {
        field.name: {
            "value": "***"
            if field.name in secret and getattr(section, field.name)
            else getattr(section, field.name),
            "default": None if field.default is attrs.NOTHING else field.default,
            "source": settings.source(f"{name}.{field.name}"),
            "help": field.metadata.get("help", ""),
        }
        for field in attrs.fields(kind)
    }
