"""Somebody else's plugin: built as a wheel, installed with pip, loaded through its entry point."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugins_for_tests import Site

PACKAGE = Path(__file__).parent / "interlock-logit-bias"
SIMULATED = """
from sim import SimPlugin, SimRunner

class Plugin(SimPlugin):
    def __init__(self):
        super().__init__(SimRunner())
"""
RUN = """
import json, sys
from interlock.engine.engine import Engine
from interlock.settings import load_settings
from sim import greedy, request, run, tokens_of

plugins, *sets = sys.argv[1:]
engine = Engine(load_settings(plugins.split(","), sets=sets))
engine.add(request("r", [1, 2, 3], greedy(5)))
tokens = tokens_of(run(engine)["r"])
print(json.dumps({"tokens": tokens, "counters": engine.stats().plugin_counters}))
"""


def call(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build output lands in the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(PACKAGE, folder / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(tmp_path_factory, wheel) -> Path:
    """The Python of a clean environment with the wheel, which also sees this process's packages."""
    folder = tmp_path_factory.mktemp("clean")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    interpreter = folder / "bin" / "python"
    call(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter),
        *("install", "--no-deps", "--no-index", wheel),
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # addsitedir, so that links of editable installs are followed as well.
    visible = [path for path in sys.path if path and Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in visible]
    (packages / "outer.pth").write_text("\n".join(lines) + "\n")
    return interpreter


@pytest.fixture
def simulated(python) -> str:
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    if not (packages / "interlock_simulated.py").exists():
        Site(packages).add("simulated", SIMULATED)
    return "simulated"


def test_the_command_line_lists_it_with_hooks_and_settings(python):
    sets = ("--set", "logit_bias.tokens=17")
    text = call(python, "-m", "interlock", "plugins", "--json", "--plugins", "logit_bias", *sets)
    (plugin,) = [p for p in json.loads(text) if p["name"] == "logit_bias"]
    assert (plugin["distribution"], plugin["version"]) == ("interlock-logit-bias", "1.2.3")
    assert plugin["enabled"] is True
    assert "interlock_logits_processor" in plugin["hooks"]
    assert plugin["settings"]["tokens"]["value"] == [17]
    assert plugin["settings"]["tokens"]["source"] == "--set"
    assert plugin["settings"]["bias"]["value"] == 5.0


def test_it_is_listed_but_not_imported_without_being_asked_for(python):
    (plugin,) = [
        p
        for p in json.loads(call(python, "-m", "interlock", "plugins", "--json"))
        if p["name"] == "logit_bias"
    ]
    assert plugin["enabled"] is False
    assert plugin["hooks"] is None


def test_it_changes_tokens_and_its_counter_moves(python, simulated):
    plain = json.loads(call(python, "-c", RUN, simulated))
    forced = json.loads(
        call(
            *(python, "-c", RUN, f"{simulated},logit_bias"),
            *("logit_bias.tokens=17", "logit_bias.bias=1000"),
        )
    )
    assert plain["counters"] == {}
    assert plain["tokens"] != forced["tokens"] == [17] * 5
    assert forced["counters"] == {"logit_bias": {"rows_total": 5.0}}


def test_its_settings_decide(python, simulated):
    plain = json.loads(call(python, "-c", RUN, simulated))
    names = f"{simulated},logit_bias"
    nothing = ("logit_bias.tokens=17,18", "logit_bias.bias=0")
    assert json.loads(call(python, "-c", RUN, names, *nothing))["tokens"] == plain["tokens"]
    with pytest.raises(AssertionError, match="ids are below 64 with this model"):
        call(python, "-c", RUN, names, "logit_bias.tokens=64")
    with pytest.raises(AssertionError, match="give token ids: --set"):
        call(python, "-c", RUN, names)
    with pytest.raises(AssertionError, match=r"did you mean logit_bias\.tokens"):
        call(python, "-c", RUN, names, "logit_bias.tokns=1")
