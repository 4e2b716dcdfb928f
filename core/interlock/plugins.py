"""Finding, loading and freezing plugins. One `Plugins` per engine; nothing is global.

Only plugins that are asked for by name are imported. Everything wrong with one of them stops the
start with the plugin, its distribution and the remedy.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import pluggy

from interlock import extension, hookspec
from interlock.errors import InterlockError, PluginError

log = logging.getLogger("interlock")

GROUP = "interlock.plugins"
IN_PROCESS = "in-process"


class PluginInfo(msgspec.Struct, frozen=True):
    """An installed plugin, as its distribution's metadata describe it; nothing is imported."""

    name: str
    distribution: str
    version: str
    entry_point: str


class PluginReport(msgspec.Struct):
    """A loaded plugin, for ``interlock plugins``, ``/plugins`` and benchmark reports."""

    name: str
    distribution: str
    version: str
    hooks: list[str]
    counters: dict[str, float] = {}


def discover() -> list[PluginInfo]:
    """All installed plugins, sorted by name then distribution; two may share a name.

    Nothing is remembered between calls. Raises PluginError if the metadata cannot be read.
    """
    try:
        found = {_info(point) for point in importlib.metadata.entry_points(group=GROUP)}
    except Exception as error:
        raise PluginError(
            f"the metadata of installed packages cannot be read: {type(error).__name__}: {error}; "
            "see: pip check"
        ) from error
    return sorted(found, key=lambda info: (info.name, info.distribution, info.version))


def _info(point: importlib.metadata.EntryPoint) -> PluginInfo:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else (None, None)
    return PluginInfo(point.name, name or "unknown", version or "unknown", point.value)


def parse_names(text: str) -> tuple[str, ...]:
    """The ``--plugins`` value as names; ``none`` and the empty text are the bare core."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if "none" in names:
        if len(names) > 1:
            raise PluginError("--plugins none stands alone: it means no plugin at all")
        return ()
    return names


@attrs.define(slots=True)
class _Loaded:
    info: PluginInfo
    instance: Any


@attrs.define(slots=True, eq=False)
class Plugins:
    """The loaded plugins of one engine, in the order asked for."""

    manager: pluggy.PluginManager
    loaded: list[_Loaded]

    @classmethod
    def load(cls, names: Sequence[str]) -> Plugins:
        """Import and register exactly ``names``. Raises PluginError for anything wrong."""
        _refuse_duplicates(names)
        installed = discover() if names else []
        infos = [_find(name, installed) for name in names]
        return cls.of({info.name: _instantiate(info) for info in infos}, infos)

    @classmethod
    def of(cls, instances: Mapping[str, Any], infos: Sequence[PluginInfo] = ()) -> Plugins:
        """Plugins from objects in this process, for tests and embedding."""
        known = {info.name: info for info in infos}
        loaded = [
            _Loaded(known.get(name) or PluginInfo(name, IN_PROCESS, "0", repr(type(obj))), obj)
            for name, obj in instances.items()
        ]
        manager = pluggy.PluginManager(hookspec.PROJECT)
        manager.add_hookspecs(hookspec)
        # pluggy calls the last registered plugin first; the order asked for is the calling order.
        for item in reversed(loaded):
            _register(manager, item)
        return cls(manager, loaded)

    @property
    def names(self) -> list[str]:
        return [item.info.name for item in self.loaded]

    @property
    def in_process(self) -> list[str]:
        """Plugins that no other process can load, since they were handed over as objects."""
        return [item.info.name for item in self.loaded if item.info.distribution == IN_PROCESS]

    def hooks_of(self, name: str) -> list[str]:
        plugin = self.manager.get_plugin(name)
        callers = self.manager.get_hookcallers(plugin) or []
        return sorted(caller.name for caller in callers)

    def reports(self, counters: Mapping[str, dict[str, float]] | None = None) -> list[PluginReport]:
        counters = counters or {}
        return [
            PluginReport(
                name=item.info.name,
                distribution=item.info.distribution,
                version=item.info.version,
                hooks=self.hooks_of(item.info.name),
                counters=counters.get(item.info.name, {}),
            )
            for item in self.loaded
        ]

    def setting_types(self) -> dict[str, type[Any]]:
        """Settings class of each plugin that has one."""
        types_ = dict(self.each("interlock_settings"))
        for name, kind in types_.items():
            if not (attrs.has(kind) and kind.__setattr__ is not object.__setattr__):
                raise PluginError(
                    f"plugin {name!r}: interlock_settings must return a frozen attrs class"
                )
        return types_

    # -- calling -------------------------------------------------------------------------------

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any], tuple[str, ...]]]:
        """``(plugin, function, argument names)`` in calling order."""
        caller = getattr(self.manager.hook, hook)
        return [
            (impl.plugin_name, impl.function, impl.argnames)
            for impl in reversed(caller.get_hookimpls())
        ]

    def each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """``(plugin, answer)`` for every plugin that answers something other than None."""
        answers = []
        for plugin, function, names in self.implementations(hook):
            answer = _call(plugin, hook, function, [arguments[n] for n in names])
            if answer is not None:
                answers.append((plugin, answer))
        return answers

    def check_options(self, request: Any) -> None:
        """Let plugins look at what a request asks of them; one that asks for nothing costs nothing.

        Raises RequestError naming the option.
        """
        if not request.extras:
            return
        for plugin, function, names in self.implementations("interlock_check_options"):
            if plugin in request.extras:
                given = {"request": request, "options": request.extras[plugin]}
                _call(plugin, "interlock_check_options", function, [given[n] for n in names])

    def close(self, engine: Any) -> None:
        """Let every plugin close what it has opened, whatever the others do."""
        for plugin, function, names in self.implementations("interlock_close"):
            try:
                function(*[engine] * len(names))
            except Exception:
                log.exception("plugin %r failed in interlock_close", plugin)

    def exclusive(self, hook: str, **arguments: Any) -> tuple[str, Any] | None:
        """The one answer to a ``firstresult`` hook; two of them are an error with both names."""
        answers = self.each(hook, **arguments)
        if len(answers) > 1:
            raise PluginError(
                f"plugins {' and '.join(repr(p) for p, _ in answers)} both claim {hook}, "
                "which has one owner; leave one of them out of --plugins"
            )
        return answers[0] if answers else None

    def merged(self, hook: str, **arguments: Any) -> dict[Any, Any]:
        """Union of the mappings that plugins answer; a key given twice is an error."""
        merged: dict[Any, Any] = {}
        owner: dict[Any, str] = {}
        for plugin, mapping in self.each(hook, **arguments):
            for key, value in mapping.items():
                if key in owner:
                    raise PluginError(
                        f"plugins {owner[key]!r} and {plugin!r} both give {key!r} in {hook}; "
                        "leave one of them out of --plugins"
                    )
                owner[key], merged[key] = plugin, value
        return merged

    def freeze(self, hook: str, engine: Any) -> Callable[..., None]:
        """A warm hook as one function of the specification's arguments after ``engine``."""
        spec = list(inspect.signature(getattr(hookspec, hook)).parameters)
        calls = tuple(
            (plugin, _adapt(function, names, spec, engine))
            for plugin, function, names in self.implementations(hook)
        )
        return _frozen(hook, calls) if calls else _nothing

    def trace(self, write: Callable[[str], None]) -> None:
        """Print every call of every hook, with its answer, through ``write``."""
        for hook in vars(self.manager.hook):
            if hook.startswith("interlock_"):
                for impl in getattr(self.manager.hook, hook).get_hookimpls():
                    impl.function = _traced(hook, impl.plugin_name, impl.function, write)


def _nothing(*_: Any) -> None:
    return None


def _adapt(
    function: Callable[..., Any], names: tuple[str, ...], spec: list[str], engine: Any
) -> Callable[..., Any]:
    """``function`` called with the specification's arguments, ``engine`` bound as the first."""
    if list(names) == spec:
        return functools.partial(function, engine)
    if list(names) == spec[1:]:
        return function
    picks = [spec.index(name) for name in names]
    return lambda *rest: function(*[(engine, *rest)[i] for i in picks])


def _frozen(hook: str, calls: tuple[tuple[str, Callable[..., Any]], ...]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        for plugin, function in calls:
            try:
                function(*arguments)
            except Exception as error:
                error.add_note(f"plugin {plugin!r}, hook {hook!r}")
                raise

    return call


def _call(plugin: str, hook: str, function: Callable[..., Any], arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except InterlockError as error:
        error.add_note(f"plugin {plugin!r}, hook {hook!r}")
        raise
    except Exception as error:
        raise PluginError(
            f"plugin {plugin!r} failed in {hook}: {type(error).__name__}: {error}"
        ) from error


def _traced(
    hook: str, plugin: str, function: Callable[..., Any], write: Callable[[str], None]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        answer = function(*arguments)
        write(f"{hook} [{plugin}] -> {_short(answer)}")
        return answer

    return call


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


# -- loading -----------------------------------------------------------------------------------


def _refuse_duplicates(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise PluginError(f"--plugins names {', '.join(twice)} twice")


def _find(name: str, installed: Iterable[PluginInfo]) -> PluginInfo:
    matches = [info for info in installed if info.name == name]
    if len(matches) > 1:
        where = " and ".join(f"{m.distribution} {m.version}" for m in matches)
        raise PluginError(
            f"plugin {name!r} is provided by {where}; uninstall one of them, "
            "so that it is clear which one runs"
        )
    if not matches:
        raise PluginError(_not_installed(name, installed))
    return matches[0]


def _not_installed(name: str, installed: Iterable[PluginInfo]) -> str:
    known = {info.name: f"{info.name} ({info.distribution} {info.version})" for info in installed}
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"plugin {name!r} is not installed; {hint}"
        f"installed plugins: {', '.join(known.values()) or 'none'}"
    )


def _instantiate(info: PluginInfo) -> Any:
    where = f"plugin {info.name!r} ({info.distribution} {info.version}, {info.entry_point})"
    try:
        points = importlib.metadata.entry_points(group=GROUP, name=info.name)
        target = next(p for p in points if p.value == info.entry_point).load()
        instance = target() if callable(target) else target
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    return instance


def _register(manager: pluggy.PluginManager, item: _Loaded) -> None:
    name = item.info.name
    _check_version(name, item.instance)
    _check_names(name, item.instance)
    try:
        manager.register(item.instance, name=name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        text = " ".join(str(error).split())
        raise PluginError(f"plugin {name!r} does not fit this engine: {text}") from error
    for caller in manager.get_hookcallers(item.instance) or []:
        for impl in caller.get_hookimpls():
            if impl.plugin_name == name:
                _check_implementation(name, caller.name, impl)


def _check_version(name: str, instance: Any) -> None:
    declared = getattr(instance, "api_version", None)
    if declared != extension.API_VERSION:
        says = "declares no api_version" if declared is None else f"speaks version {declared}"
        raise PluginError(
            f"plugin {name!r} {says}, this engine speaks version {extension.API_VERSION}; "
            f"install a release of the plugin made for it"
        )


def _check_names(plugin: str, instance: Any) -> None:
    """Refuse what pluggy would pass over in silence, or name without a hint."""
    known = [hook for hook in vars(hookspec) if hook.startswith("interlock_")]
    for name in dir(instance):
        if not name.startswith("interlock_"):
            continue
        options = getattr(getattr(instance, name), f"{hookspec.PROJECT}_impl", None)
        if options is None:
            raise PluginError(f"plugin {plugin!r}: {name} lacks the decorator @hookimpl")
        if (options.get("specname") or name) not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise PluginError(f"plugin {plugin!r}: there is no hook {name}{hint}")


def _check_implementation(plugin: str, hook: str, impl: Any) -> None:
    if impl.kwargnames:
        raise PluginError(
            f"plugin {plugin!r}: {hook} gives {', '.join(impl.kwargnames)} a default value, "
            "which would hide the real argument; remove the default"
        )
    if impl.wrapper or impl.hookwrapper:
        raise PluginError(f"plugin {plugin!r}: {hook} may not be a wrapper")
    if impl.tryfirst or impl.trylast:
        raise PluginError(
            f"plugin {plugin!r}: {hook} asks to be first or last; the order is that of --plugins"
        )


def configure(plugins: Plugins, settings: Any) -> None:
    """Hand final settings to every plugin, each with its own section."""
    for plugin, function, names in plugins.implementations("interlock_configure"):
        given = {"settings": settings, "section": settings.sections.get(plugin)}
        _call(plugin, "interlock_configure", function, [given[n] for n in names])


def stderr_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
