"""`plugins`, `models` and `doctor`: what they list, in text and JSON, and their remedies."""

from __future__ import annotations

import http.server
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from interlock.cli import doctor, main
from interlock.cli.console import ProgressBars, progress_bars, size
from interlock.cli.models import flatten
from interlock.errors import WeightsError
from interlock.hookspec import hookimpl
from interlock.settings import EngineSettings, Settings, option

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"


@attrs.frozen(kw_only=True)
class SampleSettings:
    strength: int = option(3, "how strong")


class Sample:
    api_version = 1

    @hookimpl
    def interlock_settings(self) -> type[Any]:
        return SampleSettings

    @hookimpl
    def interlock_commands(self, subparsers: Any) -> None:
        parser = subparsers.add_parser("wave", help="say hello")
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 0)


def install(folder: Path, distribution: str, **plugins: str) -> None:
    """Pretend that a distribution with these entry points is installed in ``folder``."""
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(name=distribution))
    lines = [f"{name} = {target}" for name, target in plugins.items()]
    (info / "entry_points.txt").write_text("\n".join(["[interlock.plugins]", *lines, ""]))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: Any) -> Path:
    """``sample`` works, ``broken`` fails at import and leaves a mark when it is imported."""
    module = SimpleNamespace(Sample=Sample)
    monkeypatch.setitem(sys.modules, "sample_module_of_tests", module)
    (tmp_path / "broken_module_of_tests.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "raise SystemExit('no driver')\n"
    )
    install(
        tmp_path,
        "interlock-sample",
        sample="sample_module_of_tests:Sample",
        broken="broken_module_of_tests:Broken",
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def plugins(capsys: Any, *words: str) -> dict[str, dict[str, Any]]:
    assert main(["plugins", "--json", *words]) == 0
    return {p["name"]: p for p in json.loads(capsys.readouterr().out)}


# -- plugins -----------------------------------------------------------------------------------


def test_unrequested_plugins_are_listed_and_not_imported(installed: Path, capsys: Any) -> None:
    listed = plugins(capsys)
    assert listed["broken"]["distribution"] == "interlock-sample"
    assert (listed["broken"]["version"], listed["broken"]["enabled"]) == ("1.2", False)
    assert listed["sample"]["hooks"] is None
    assert not (installed / "imported").exists()


def test_enabled_plugins_show_hooks_and_settings(installed: Path, capsys: Any) -> None:
    listed = plugins(capsys, "--plugins", "sample", "--set", "sample.strength=5")
    assert next(iter(listed)) == "sample"
    assert listed["sample"]["enabled"] is True
    assert listed["sample"]["hooks"] == ["interlock_commands", "interlock_settings"]
    assert listed["sample"]["settings"]["strength"] == {
        "value": 5,
        "default": 3,
        "source": "--set",
        "help": "how strong",
    }


def test_plain_listing_is_tab_separated(installed: Path, capsys: Any) -> None:
    assert main(["plugins", "--plugins", "sample"]) == 0
    out = capsys.readouterr().out
    assert "sample\tyes\t1.2\tinterlock-sample\tcommands settings\n" in out
    assert "sample.strength\t3\t3\tdefault\thow strong\n" in out
    assert "broken\tno\t1.2\tinterlock-sample\t(not imported)\n" in out


def test_a_requested_broken_plugin_is_an_error(installed: Path, capsys: Any) -> None:
    assert main(["plugins", "--plugins", "broken"]) == 2
    err = capsys.readouterr().err
    assert "broken" in err
    assert "interlock-sample 1.2" in err
    assert "no driver" in err
    assert err.count("\n") == 1


def test_a_misspelt_plugin_gets_near_matches(installed: Path, capsys: Any) -> None:
    assert main(["serve", "--plugins", "sampel"]) == 2
    assert "did you mean sample" in capsys.readouterr().err


def test_a_plugin_adds_a_command_when_named(installed: Path, capsys: Any, monkeypatch: Any) -> None:
    assert main(["wave", "you"]) == 2
    assert main(["wave", "you", "--plugins", "sample"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    monkeypatch.setenv("INTERLOCK_PLUGINS", "sample")
    assert main(["wave", "me"]) == 0


class PluginsHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Bearer k" and self.path == "/plugins"
        self.send_response(200 if right else 401)
        self.end_headers()
        report = {"name": "far", "version": "9", "distribution": "d", "counters": {"hits_total": 4}}
        self.wfile.write(json.dumps({"plugins": [report]}).encode())

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), PluginsHandler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def test_counters_of_a_running_server(server: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_API_KEY", "k")
    assert main(["plugins", "--url", server]) == 0
    assert "far\thits_total\t4\n" in capsys.readouterr().out


def test_a_server_that_refuses_is_one_line(server: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("INTERLOCK_API_KEY", raising=False)
    assert main(["plugins", "--url", server]) == 1
    assert "401" in capsys.readouterr().err.splitlines()[0]


# -- models ------------------------------------------------------------------------------------


def test_models_list_shows_size_and_licence(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path))
    assert main(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m\t98.4 MB\tApache-2.0\tno\t" in out
    assert str(tmp_path) in out


def test_models_list_json(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path))
    assert main(["models", "list", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["cache"] == str(tmp_path)
    assert listing["models"][0]["pulled"] is False


def test_pull_prints_the_path(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    asked = []

    def pull(name: str, progress: Any) -> Any:
        asked.append(name)
        progress(1, 2_000_000)
        return SimpleNamespace(name=name, path=tmp_path / "m.gguf", revision="r")

    monkeypatch.setattr("interlock.weights.resolve.pull", pull)
    assert main(["models", "pull", "smollm2-135m"]) == 0
    announced = "interlock: downloading smollm2-135m (2.0 MB)\n"
    assert capsys.readouterr() == (f"{tmp_path / 'm.gguf'}\n", announced)
    assert asked == ["smollm2-135m"]


def test_pulling_an_unknown_model_is_one_line(capsys: Any) -> None:
    assert main(["models", "pull", "nosuch"]) == 1
    assert "smollm2-135m" in capsys.readouterr().err


def test_inspect_flattens_what_the_loader_says(capsys: Any, monkeypatch: Any) -> None:
    description = {"config": {"hidden_size": 64}, "weight_bytes": 2_000_000}
    module = SimpleNamespace(describe=lambda _, **__: description)
    monkeypatch.setitem(sys.modules, "interlock.models.inspect", module)
    monkeypatch.setattr("interlock.weights.resolve.resolve", lambda *_, **__: "files")
    assert main(["models", "inspect", "m"]) == 0
    out = capsys.readouterr().out
    assert "config.hidden_size\t64\n" in out
    assert "weight_bytes\t2000000 (2.0 MB)\n" in out
    assert main(["models", "inspect", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == description


def test_inspecting_something_that_is_no_model(tmp_path: Path, capsys: Any) -> None:
    bad = tmp_path / "x.gguf"
    bad.write_bytes(b"not a model at all")
    assert main(["models", "inspect", str(bad)]) == 1
    assert str(bad) in capsys.readouterr().err


def test_flatten_cuts_long_lists() -> None:
    assert flatten({"a": {"b": list(range(20))}}) == [
        ["a.b", "0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)"]
    ]


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (999, 98_362_432, 3e12)] == ["999 B", "98.4 MB", "3.0 TB"]


# -- doctor ------------------------------------------------------------------------------------


def levels(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.area: finding.level for finding in findings}


def test_a_check_that_raises_does_not_hide_the_others() -> None:
    def broken_findings(_: Settings) -> list[doctor.Finding]:
        raise WeightsError("file is truncated; pull it again")

    (finding,) = doctor._guarded(broken_findings, Settings())
    assert (finding.area, finding.level) == ("broken", "error")
    assert finding.remedy == "file is truncated; pull it again"


def test_machine_names_cpu_cores_and_memory() -> None:
    found = levels(doctor.machine_findings(Settings()))
    assert {"python", "cpu", "cpu features", "cores", "memory"} <= set(found)


def test_little_memory_is_a_warning_with_a_remedy() -> None:
    finding = doctor._memory_finding(10**8, 10**10)
    assert finding.level == "warning"
    assert "--kv-cache-bytes" in finding.remedy


def test_features_are_read_from_the_processor_file(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "cpuinfo").write_text("model name : X\nflags : fpu avx2 amx_bf16 sse\n")
    monkeypatch.setattr("interlock.bench.machine.CPUINFO", tmp_path / "cpuinfo")
    assert doctor.cpu_features() == ["avx2", "amx_bf16"]


def test_a_model_to_be_downloaded_is_a_warning(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path))
    (finding,) = doctor.model_findings(Settings())
    assert finding.level == "warning"
    assert finding.remedy.endswith("interlock models pull smollm2-135m")


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    settings = Settings(engine=EngineSettings(model=str(tmp_path / "gone.gguf")))
    (finding,) = doctor._guarded(doctor.model_findings, settings)
    assert finding.level == "error"


def test_a_cache_that_is_a_file_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path / "file"))
    (finding,) = doctor.cache_findings(Settings())
    assert (finding.level, finding.remedy) == ("error", "set INTERLOCK_CACHE to a folder")


def test_an_asked_for_gpu_that_is_not_there_is_an_error() -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    settings = Settings(engine=EngineSettings(device="cuda"))
    (finding,) = doctor._gpu_findings(fake, settings)
    assert finding.level == "error"
    assert "--device cpu" in finding.remedy
    (finding,) = doctor._gpu_findings(fake, Settings())
    assert finding.level == "ok"


def test_two_plugins_of_one_name_are_reported(installed: Path, monkeypatch: Any) -> None:
    second = installed / "second"
    second.mkdir()
    install(second, "interlock-other", sample="elsewhere:Sample")
    monkeypatch.syspath_prepend(second)
    assert levels(doctor.plugin_findings(Settings()))["plugin sample"] == "warning"


def fake_examination(monkeypatch: Any, *findings: doctor.Finding) -> None:
    monkeypatch.setattr("interlock.cli.doctor.examine", lambda _: list(findings))


def test_doctor_exit_code_follows_the_worst_finding(monkeypatch: Any, capsys: Any) -> None:
    fake_examination(monkeypatch, doctor.Finding("disk", "low", "warning", "free some"))
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "disk\tlow\twarning\n" in captured.out
    assert captured.err == "interlock: warning: disk: free some\n"
    fake_examination(monkeypatch, doctor.Finding("torch", "gone", "error", "reinstall"))
    assert main(["doctor", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding == {"area": "torch", "value": "gone", "level": "error", "remedy": "reinstall"}


# -- progress ----------------------------------------------------------------------------------


def test_no_bars_without_a_terminal(capsys: Any) -> None:
    with progress_bars() as bars:
        assert bars is None
    assert capsys.readouterr().err == ""


def test_bars_show_bytes_and_shares() -> None:
    from rich.progress import Progress

    progress = Progress()
    bars = ProgressBars(progress)
    update = bars.download("m")
    update(0, 100)
    update(50, 100)
    bars.load("layer 3", 0.25)
    tasks = [(t.description, t.completed, t.fields["detail"]) for t in progress.tasks]
    assert tasks == [("Downloading m", 0.5, "50 B of 100 B"), ("Loading", 0.25, "layer 3")]
