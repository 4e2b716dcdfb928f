"""Loading plugins: what is installed, what is asked for, and everything that can be wrong with it.

Distributions are folders with metadata, as pip writes them, on ``sys.path``. The names in
parentheses are reports in which users broke other engines.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import attrs
import pytest

from interlock.engine.engine import Engine
from interlock.errors import ConfigError, PluginError, describe_error
from interlock.extension import Match
from interlock.hookspec import WARM, hookimpl
from interlock.plugins import Plugins, discover, parse_names
from interlock.settings import EngineSettings, Settings, load_settings, option
from plugins_for_tests import GOOD, Base, Site
from sim import SimPlugin, SimRunner, expected_tokens, greedy, request, run, tokens_of


def refusal(*names: str) -> str:
    with pytest.raises(PluginError) as error:
        Plugins.load(names)
    return str(error.value)


def of(plugin: object, name: str = "mine") -> Plugins:
    return Plugins.of({name: plugin})


def refused(plugin: object) -> str:
    with pytest.raises(PluginError) as error:
        of(plugin)
    return str(error.value)


# -- what is asked for ---------------------------------------------------------------------------


def test_installed_plugins_are_listed_from_metadata_alone(site):
    site.add("good")
    site.add("broken", "raise SystemExit(3)")
    found = {info.name: info for info in discover()}
    assert found["good"].distribution == "interlock-good"
    assert found["good"].version == "1.0"
    assert found["broken"].entry_point == "interlock_broken:Plugin"
    assert "interlock_broken" not in sys.modules


def test_only_what_is_asked_for_is_imported_in_that_order(site):
    for name in ("b", "a", "c"):
        site.add(name)
    assert Plugins.load(["c", "a"]).names == ["c", "a"]
    assert "interlock_b" not in sys.modules


def test_a_misspelt_name_is_refused_with_near_matches_and_where_each_came_from(site):
    """(PLG-03)"""
    site.add("warm_lookups", dist="acme-cache", version="2.1")
    site.add("other")
    message = refusal("warm_lokups")
    assert "'warm_lokups' is not installed" in message
    assert "did you mean warm_lookups?" in message
    assert "warm_lookups (acme-cache 2.1)" in message
    assert "other (interlock-other 1.0)" in message


def test_a_stale_copy_first_on_the_path_is_visible_in_the_refusal(site, tmp_path, monkeypatch):
    """(PLG-03) The stale metadata of the same distribution hide the new entry point."""
    site.add("new_name", dist="acme")
    stale = Site(tmp_path / "stale")
    stale.folder.mkdir()
    stale.add("old_name", dist="acme", version="0.1")
    monkeypatch.syspath_prepend(stale.folder)
    assert "old_name (acme 0.1)" in refusal("new_name")


@pytest.mark.parametrize("reverse", [False, True])
def test_two_distributions_with_one_plugin_name_are_refused_with_both(
    tmp_path, monkeypatch, reverse
):
    """(PLG-07)"""
    for dist in sorted(["acme-one", "zeta-two"], reverse=reverse):
        site = Site(tmp_path / dist)
        site.folder.mkdir()
        site.add("same", dist=dist)
        monkeypatch.syspath_prepend(site.folder)
    message = refusal("same")
    assert "acme-one 1.0 and zeta-two 1.0" in message
    assert "uninstall one" in message


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("raise ImportError('needs CUDA')", "ImportError: needs CUDA"),
        ("raise OSError('libfoo.so: cannot open')", "OSError: libfoo.so"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "AttributeError"),
        ("class Plugin:\n  def __init__(self): raise KeyError('half')", "KeyError: 'half'"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_broken_plugin_is_fatal_if_asked_for_and_unnoticed_if_not(site, source, cause):
    """(PLG-01)"""
    site.add("broken", source, version="3.2")
    site.add("good")
    assert Plugins.load(["good"]).names == ["good"]
    message = refusal("good", "broken")
    assert "plugin 'broken' (interlock-broken 3.2" in message
    assert cause in message


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"], ["plugins"]])
def test_commands_import_none_of_ten_installed_plugins(site, tmp_path, words):
    """(PLG-01, CLI-01) One broken or slow plugin must not touch a command that does not ask."""
    for i in range(10):
        touch = f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        site.add(f"p{i}", touch + "raise SystemExit('broken')")
    path = os.pathsep.join([str(site.folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "interlock", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    assert not (tmp_path / "imported").exists()


def test_an_error_of_discovery_passes_with_its_cause(site, monkeypatch):
    """(PLG-12) One error does not make plugins disappear for the rest of the process."""
    site.add("good")
    real = importlib.metadata.entry_points

    def once(**given):
        monkeypatch.setattr(importlib.metadata, "entry_points", real)
        raise OSError("stale file handle")

    monkeypatch.setattr(importlib.metadata, "entry_points", once)
    assert "OSError: stale file handle" in refusal("good")
    assert Plugins.load(["good"]).names == ["good"]


def test_the_bare_core_does_not_even_look_for_plugins(monkeypatch):
    def never(**given):
        raise AssertionError

    monkeypatch.setattr(importlib.metadata, "entry_points", never)
    assert Plugins.load([]).names == []


def test_metadata_without_a_name_are_listed_as_unknown(site):
    site.add("nameless")
    (metadata,) = site.folder.glob("*.dist-info/METADATA")
    metadata.write_text("Metadata-Version: 2.1\n")
    (info,) = [info for info in discover() if info.name == "nameless"]
    assert (info.distribution, info.version) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("text", "names"),
    [("none", ()), ("", ()), ("a", ("a",)), ("b,a", ("b", "a")), (" a , b ,", ("a", "b"))],
)
def test_the_plugins_option_is_the_exact_list(text, names):
    assert parse_names(text) == names


def test_none_beside_names_and_a_name_twice_are_refused():
    with pytest.raises(PluginError, match="stands alone"):
        parse_names("a,none")
    assert "names a twice" in refusal("a", "b", "a")


# -- whether it fits -----------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "says"), [(None, "declares no"), (2, "version 2"), ("1", "1")])
def test_another_api_version_is_refused_with_both_versions(version, says):
    """(PLG-08)"""

    class Plugin:
        api_version = version

    message = refused(Plugin())
    assert says in message
    assert "this engine speaks version 1" in message


def test_an_unknown_hook_is_refused_with_near_matches():
    class Plugin(Base):
        @hookimpl
        def interlock_pol(self, engine):
            pass

    assert "no hook interlock_pol; did you mean interlock_poll or" in refused(Plugin())


def test_a_hook_without_its_decorator_is_refused_instead_of_being_inert():
    class Plugin(Base):
        def interlock_poll(self):
            pass

    assert "interlock_poll lacks the decorator @hookimpl" in refused(Plugin())


def test_an_argument_that_the_hook_does_not_have_is_refused_by_name():
    class Plugin(Base):
        @hookimpl
        def interlock_reclaim(self, engine, blocks):
            pass

    message = refused(Plugin())
    assert "plugin 'mine'" in message
    assert "interlock_reclaim" in message
    assert "blocks" in message


def test_a_default_value_is_refused_because_it_would_hide_the_argument():
    class Plugin(Base):
        @hookimpl
        def interlock_reclaim(self, engine, num_blocks=1):
            pass

    assert "gives num_blocks a default value" in refused(Plugin())


def test_wrappers_and_places_in_the_order_are_refused():
    class Wrapper(Base):
        @hookimpl(wrapper=True)
        def interlock_poll(self):
            return (yield)

    class First(Base):
        @hookimpl(tryfirst=True)
        def interlock_poll(self):
            pass

    assert "may not be a wrapper" in refused(Wrapper())
    assert "the order is that of --plugins" in refused(First())


class Source:
    def match(self, request, start, stop):
        return Match(0)

    def settle(self, request, start, num_tokens):
        pass


class OldSource(Source):
    def match(self, request, num_computed_tokens):
        return Match(0)


class PartialSource:
    match = Source.match


def giving(source: object) -> Base:
    class Plugin(Base):
        @hookimpl
        def interlock_kv_source(self):
            return source

    return Plugin()


def sim_with(**plugins: object) -> Engine:
    given = {"sim": SimPlugin(SimRunner()), **plugins}
    return Engine(Settings(engine=EngineSettings()), plugins=Plugins.of(given))


def test_an_object_of_another_interface_is_refused_at_start_with_what_is_missing():
    """(PLG-11)"""
    sim_with(fits=giving(Source()))
    with pytest.raises(PluginError, match=r"'old': KVSource.match must accept \(request, start"):
        sim_with(old=giving(OldSource()))
    with pytest.raises(PluginError, match=r"'part': PartialSource has no method settle\(\)"):
        sim_with(part=giving(PartialSource()))


# -- ownership, order, errors --------------------------------------------------------------------


class Recorder(Base):
    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__()
        self.name, self.calls = name, calls

    @hookimpl
    def interlock_poll(self):
        self.calls.append(self.name)


def test_plugins_are_called_in_the_order_asked_for():
    calls: list[str] = []
    plugins = {name: Recorder(name, calls) for name in ("z", "a", "m")}
    engine = sim_with(**plugins)
    engine.step()
    assert calls == ["z", "a", "m"]
    assert engine.plugins.names == ["sim", "z", "a", "m"]


@pytest.mark.parametrize("answer", ["text", 0, False, ()])
def test_a_hook_with_one_owner_refuses_two_claimants_with_both_names(answer):
    class Claims(Base):
        @hookimpl
        def interlock_drafter(self):
            return answer

    plugins = Plugins.of({"first": Claims(), "second": Claims()})
    with pytest.raises(PluginError, match="'first' and 'second' both claim interlock_drafter"):
        plugins.exclusive("interlock_drafter", engine=None)
    assert of(Claims()).exclusive("interlock_drafter", engine=None) == ("mine", answer)


def test_a_key_that_two_plugins_give_is_refused_with_both_names():
    class Kernels(Base):
        @hookimpl
        def interlock_kernels(self):
            return {("rms_norm", "cpu"): len}

    plugins = Plugins.of({"first": Kernels(), "second": Kernels()})
    with pytest.raises(PluginError, match=r"'first' and 'second' both give \('rms_norm', 'cpu'\)"):
        plugins.merged("interlock_kernels", device=None, dtype=None)


class Fails(Base):
    @hookimpl
    def interlock_configure(self):
        raise ZeroDivisionError("cold")

    @hookimpl
    def interlock_poll(self):
        raise ZeroDivisionError("warm")


def test_an_error_in_a_hook_names_plugin_and_hook():
    plugins = of(Fails())
    with pytest.raises(PluginError, match="plugin 'mine' failed in interlock_configure: ZeroDiv"):
        plugins.each("interlock_configure", settings=None, section=None)
    with pytest.raises(ZeroDivisionError) as error:
        plugins.freeze("interlock_poll", engine=None)()
    assert "plugin 'mine', hook 'interlock_poll'" in describe_error(error.value)


def test_a_refusal_by_a_plugin_keeps_its_own_words():
    class Refuses(Base):
        @hookimpl
        def interlock_configure(self, section):
            raise ConfigError("mine.size: needs a GPU")

    with pytest.raises(ConfigError, match=r"^mine.size: needs a GPU") as error:
        sim_with(mine=Refuses())
    assert "interlock_configure" in describe_error(error.value)


@pytest.mark.parametrize("hook", sorted(WARM))
def test_a_frozen_hook_without_implementations_is_one_call_of_nothing(hook):
    frozen = Plugins.of({}).freeze(hook, engine=None)
    assert frozen is Plugins.of({}).freeze("interlock_poll", engine=None)
    assert frozen() is None


def test_a_frozen_hook_gives_each_implementation_the_arguments_that_it_takes():
    seen = []

    class All(Base):
        @hookimpl
        def interlock_kv_committed(self, engine, spans):
            seen.append((engine, spans))

    class Swapped(Base):
        @hookimpl
        def interlock_kv_committed(self, spans, engine):
            seen.append((spans, engine))

    class Nothing(Base):
        @hookimpl
        def interlock_kv_committed(self):
            seen.append(())

    plugins = Plugins.of({"a": All(), "b": Swapped(), "c": Nothing()})
    plugins.freeze("interlock_kv_committed", "engine")("spans")
    assert seen == [("engine", "spans"), ("spans", "engine"), ()]


# -- settings, processes, engines ----------------------------------------------------------------


def test_a_settings_class_that_is_not_frozen_attrs_is_refused():
    class Loose(Base):
        @hookimpl
        def interlock_settings(self):
            return dict

    @attrs.define
    class Section:
        size: int = option(1, "a size")

    class Mutable(Base):
        @hookimpl
        def interlock_settings(self):
            return Section

    for plugin in (Loose(), Mutable()):
        with pytest.raises(PluginError, match="must return a frozen attrs class"):
            of(plugin).setting_types()


def test_two_engines_in_one_process_share_nothing(site):
    site.add("good")
    settings = load_settings(["good"])
    first, second = (Plugins.load(settings.plugins) for _ in range(2))
    engines = []
    for plugins in (first, second):
        loaded = {item.info.name: item.instance for item in plugins.loaded}
        engines.append(sim_with(**loaded))
    engines[0].add(request("r", [1, 2], greedy(3)))
    assert tokens_of(run(engines[0])["r"]) == expected_tokens([1, 2], 3)
    steps = [engine.stats().plugin_counters["good"]["steps_total"] for engine in engines]
    assert steps == [3.0, 0.0]


def test_a_new_process_loads_what_it_runs_exactly_once(site, tmp_path):
    """(PLG-04) Nothing is inherited: what a process needs, it loads itself."""
    site.add(
        "witness",
        GOOD + "    @hookimpl\n    def interlock_configure(self):\n"
        "        import os\n"
        f"        with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "            print(os.getpid(), file=file)\n",
    )
    code = (
        "import json, os, sys\n"
        "sys.path[:0] = json.loads(sys.argv[1])\n"
        "from interlock.plugins import Plugins, configure\n"
        "from interlock.settings import load_settings\n"
        "settings = load_settings(['witness'])\n"
        "configure(Plugins.load(settings.plugins), settings)\n"
        "print(os.getpid())\n"
    )
    pids = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            capture_output=True,
            text=True,
            check=True,
        )
        pids.append(done.stdout.strip())
    assert (tmp_path / "seen").read_text().split() == pids


def test_the_report_says_what_is_loaded_and_what_it_did(site):
    site.add("good", version="4.5")
    plugins = Plugins.load(["good"])
    (report,) = plugins.reports({"good": {"steps_total": 2.0}})
    assert (report.name, report.distribution, report.version) == ("good", "interlock-good", "4.5")
    assert report.hooks == ["interlock_counters", "interlock_step_done"]
    assert report.counters == {"steps_total": 2.0}
