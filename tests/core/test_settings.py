"""Settings from defaults, a TOML file, flags and ``--set``: every key is applied or is an error."""

from __future__ import annotations

import pickle
import subprocess
import sys

import attrs
import pytest

from interlock.errors import ConfigError, PluginError
from interlock.settings import (
    CORE_SECTIONS,
    EngineSettings,
    ServerSettings,
    Settings,
    describe,
    load_settings,
)

SIZED = """
import attrs
from interlock.hookspec import hookimpl
from interlock.settings import option

@attrs.frozen(kw_only=True)
class Section:
    size: int = option(4, "blocks", attrs.validators.ge(1))
    on: bool = option(True, "whether it does anything")
    tags: tuple[str, ...] = option(("a",), "names")
    limit: float | None = option(2.5, "seconds")
    path: str = option("x", "a file")

class Plugin:
    api_version = 1
    @hookimpl
    def interlock_settings(self):
        return Section
"""


@pytest.fixture
def sized(site):
    site.add("sized", SIZED)
    return ["sized"]


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


def refusal(**given) -> str:
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    return str(error.value)


def test_defaults_are_the_classes_own():
    settings = load_settings()
    assert settings == Settings()
    assert settings.engine == EngineSettings()
    assert settings.server == ServerSettings()
    assert settings.source("engine.model") == "default"


def test_later_sources_win_and_each_value_remembers_its_source(toml):
    path = toml("[engine]\nblock_size = 8\nmax_num_seqs = 2\nthreads = 1\n[server]\nport = 1\n")
    settings = load_settings(
        config_file=path,
        flags={"engine.max_num_seqs": 3, "engine.threads": 2, "engine.dtype": None},
        sets=["engine.threads=4", "engine.threads=5"],
    )
    engine = settings.engine
    assert (engine.block_size, engine.max_num_seqs, engine.threads) == (8, 3, 5)
    assert (settings.server.port, engine.dtype) == (1, "auto")
    keys = ("block_size", "max_num_seqs", "threads", "dtype")
    shown = [settings.source(f"engine.{key}") for key in keys]
    assert shown == [f"file {path}", "flag", "--set", "default"]


def test_false_zero_and_empty_are_values(sized, toml):
    """(CLI-05) Nothing that is given is taken for "not given"."""
    path = toml('[sized]\non = false\ntags = []\npath = ""\n[server]\nport = 0\n')
    settings = load_settings(sized, path)
    section = settings.section("sized")
    assert (section.on, section.tags, section.path, settings.server.port) == (False, (), "", 0)
    assert settings.source("sized.on") == f"file {path}"
    flags = {"sized.on": False, "sized.tags": (), "sized.path": "", "server.port": 0}
    assert load_settings(sized, flags=flags).section("sized") == section
    sets = ["sized.on=false", "sized.tags=", "sized.path=", "server.port=0"]
    assert load_settings(sized, sets=sets).section("sized") == section


@pytest.mark.parametrize("text", ["none", "null", "None"])
def test_none_is_written_as_none(sized, text):
    sets = [f"sized.limit={text}", f"engine.served_model_name={text}"]
    settings = load_settings(sized, sets=sets)
    assert settings.section("sized").limit is None
    assert settings.engine.served_model_name is None
    assert load_settings(sets=["engine.model=none"]).engine.model == "none"


def test_a_value_may_hold_an_equals_sign_and_commas_make_a_tuple(sized):
    settings = load_settings(sized, sets=["sized.path=a=b", "sized.tags=x,y"])
    assert settings.section("sized").path == "a=b"
    assert settings.section("sized").tags == ("x", "y")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("engine.max_num_sequences", "did you mean engine.max_num_seqs"),
        ("engin.model", "unknown section 'engin'; did you mean engine"),
        ("prefix.size", "unknown section 'prefix'; known: engine, server (a plugin's"),
        ("sized.sise", "did you mean sized.size"),
        ("sized.zzz", "known: sized.limit, sized.on, sized.path, sized.size, sized.tags"),
    ],
)
def test_an_unknown_key_is_refused_with_near_ones_whatever_its_source(sized, toml, key, says):
    section, name = key.split(".")
    path = toml(f"[{section}]\n{name} = 1\n")
    given = [{"config_file": path}, {"flags": {key: 1}}, {"sets": [f"{key}=1"]}]
    for source, sources in zip((f"file {path}", "flag", "--set"), given, strict=True):
        message = refusal(plugins=sized, **sources)
        assert message.startswith(f"{source}: unknown")
        assert says.replace("known: engine, server", "known: engine, server, sized") in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.block_size", "many"),
        ("engine.block_size", ""),
        ("engine.block_size", "1.5"),
        ("engine.batch_invariant", "maybe"),
        ("engine.dtype", "float16"),
        ("engine.request_timeout_s", "soon"),
        ("server.port", "none"),
        ("sized.on", "2"),
    ],
)
def test_a_wrong_type_is_refused_with_key_and_value(sized, key, value):
    message = refusal(plugins=sized, sets=[f"{key}={value}"])
    assert message.startswith(f"{key}: ")
    assert repr(value) in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.block_size", 0),
        ("engine.block_size", 1025),
        ("engine.num_blocks", 0),
        ("engine.max_num_seqs", -1),
        ("engine.request_timeout_s", 0.0),
        ("engine.request_timeout_s", float("nan")),
        ("server.port", 65536),
        ("server.max_body_bytes", 10),
        ("server.stall_timeout_s", 0),
        ("sized.size", 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_key_and_bound(sized, key, value):
    message = refusal(plugins=sized, flags={key: value})
    section, name = key.split(".")
    assert message.startswith(f"{section}: ")
    assert name in message
    assert str(value) in message


def test_types_of_toml_values_are_checked_too(toml):
    assert "engine.model" in refusal(config_file=toml("[engine]\nmodel = [1]\n"))
    assert "[engine] is expected" in refusal(config_file=toml("engine = 3\n"))
    assert 'plugins = ["a", "b"]' in refusal(config_file=toml('plugins = "a"\n'))
    assert 'plugins = ["a", "b"]' in refusal(config_file=toml("plugins = [1]\n"))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, toml):
    assert "No such file" in refusal(config_file=tmp_path / "none.toml")
    assert "not valid TOML" in refusal(config_file=toml("[engine\n"))
    path = toml("")
    path.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(config_file=path)
    assert "config.toml" in refusal(config_file=path)


@pytest.mark.parametrize("text", ["engine.model", "model=x", "=x", ""])
def test_a_set_without_key_or_value_shows_the_form(text):
    assert "section.key=value" in refusal(sets=[text])


def test_the_files_plugins_are_used_unless_the_caller_names_some(sized, toml):
    path = toml('plugins = ["sized"]\n[sized]\nsize = 7\n')
    assert load_settings(config_file=path).plugins == ("sized",)
    assert load_settings(config_file=path).section("sized").size == 7
    with pytest.raises(ConfigError, match="unknown section 'sized'"):
        load_settings((), path)


def test_a_plugin_that_takes_a_core_sections_name_is_refused(site):
    site.add("engine", SIZED)
    with pytest.raises(PluginError, match=r"'engine'.*section of the core"):
        load_settings(["engine"])


def test_settings_are_frozen_and_travel_to_other_processes(sized):
    settings = load_settings(sized, sets=["sized.size=9"])
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.engine.model = "x"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_describe_shows_value_default_source_and_help_and_no_key(sized):
    flags = {"server.api_key": ("secret",)}
    shown = describe(load_settings(sized, flags=flags, sets=["sized.size=9"]))
    assert shown["sized"]["size"] == {
        "value": 9,
        "default": 4,
        "source": "--set",
        "help": "blocks",
    }
    assert shown["server"]["api_key"]["value"] == "***"
    assert "secret" not in repr(shown)
    for name, kind in CORE_SECTIONS.items():
        assert list(shown[name]) == [field.name for field in attrs.fields(kind)]
        assert all(entry["help"] for entry in shown[name].values())


def test_settings_need_no_torch():
    code = (
        "import sys, interlock.settings as s; s.load_settings(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
