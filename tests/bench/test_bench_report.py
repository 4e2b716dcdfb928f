"""From a job to its report: floors, problems, tables, ablation and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from interlock.bench import run as bench_run
from interlock.bench.ablate import bought, variants
from interlock.bench.compare import Protocol
from interlock.bench.metrics import Burst, Trace
from interlock.bench.prompts import PromptSource
from interlock.bench.report import (
    Report,
    counter_rows,
    floor_rows,
    gain_rows,
    number,
    python_share,
    summary_rows,
)
from interlock.bench.run import Job, run_job
from interlock.bench.spec import Load, Target
from interlock.cli import main
from interlock.errors import ConfigError, InterlockError
from interlock.settings import Settings

LOADS = [Load(1, 1, 8, 4), Load(2, 4, 8, 4)]


def quiet(_: str) -> None:
    return None


def job(targets: list[Target], **kwargs: Any) -> Job:
    return Job(targets, LOADS, Protocol(repeats=3, warmup=0), **kwargs)


@pytest.fixture
def two(fake_session: Any) -> tuple[Report, list[Any]]:
    sessions = {"a": fake_session(1.0, ["p"]), "b": fake_session(2.0)}
    targets = [Target(label="a", plugins=("p",)), Target(label="b")]
    report = run_job(
        job(targets), PromptSource(range(50)), quiet, lambda target: sessions[target.label]
    )
    return report, list(sessions.values())


def test_report_has_every_load_and_configuration(two: Any) -> None:
    report, sessions = two
    assert [r.load for r in report.loads] == LOADS
    assert [c.label for c in report.loads[0].configurations] == ["a", "b"]
    assert report.machine["cores"] >= 1
    assert report.problems == []
    assert all(session.closed for session in sessions)


def test_report_survives_json(two: Any) -> None:
    again = msgspec.json.decode(msgspec.json.encode(two[0]), type=Report)
    assert again == two[0]


def test_paired_ratios_are_of_the_first_over_the_other(two: Any) -> None:
    headings, rows = gain_rows(two[0].loads[0])
    assert rows[0][0] == "a vs b"
    assert rows[0][headings.index("output")] == "2.00 [2.00..2.00]"
    assert rows[0][headings.index("TTFT")] == "2.00 [2.00..2.00]"


def test_summary_rows_show_median_and_range(two: Any) -> None:
    headings, rows = summary_rows(two[0].loads[0])
    assert rows[0][headings.index("TTFT ms")] == "1000 [1000..1000]"
    assert rows[0][headings.index("output tok/s")] == "1.00 [1.00..1.00]"
    assert rows[1][headings.index("TPOT ms")] == "2000 [2000..2000]"
    assert rows[0][headings.index("p99 TTFT/ITL ms")] == "1000 / 1000"


def test_counters_are_summed_over_the_repeats(two: Any) -> None:
    _, rows = counter_rows(two[0])
    assert rows == [["a", "p", "calls_total", "6.00"]]


def test_a_plugin_that_did_nothing_is_a_problem(fake_session: Any) -> None:
    target = Target(label="a", plugins=("p",))
    session = fake_session(1.0, ["p"], moving=False)
    report = run_job(job([target]), PromptSource(range(50)), quiet, lambda _: session)
    assert report.problems == ["a: no counter of plugin 'p' moved"]


def test_failed_requests_are_a_problem_with_an_example(fake_session: Any) -> None:
    session = fake_session(1.0)
    session._trace = lambda *_: Trace(0.0, [], 1.0, 8, error="boom")
    report = run_job(job([Target(label="a")]), PromptSource(range(50)), quiet, lambda _: session)
    assert "a: 3 requests failed at concurrency 1, for example: boom" in report.problems


def test_sessions_are_closed_when_a_later_one_cannot_start(fake_session: Any) -> None:
    first = fake_session(1.0)

    def opener(target: Target) -> Any:
        if target.label == "b":
            raise InterlockError("no such model")
        return first

    with pytest.raises(InterlockError):
        run_job(job([Target(label="a"), Target(label="b")]), PromptSource(range(9)), quiet, opener)
    assert first.closed


def test_python_share_is_planning_and_committing_over_the_step() -> None:
    totals = {
        "plan_seconds_total": 1.0,
        "forward_seconds_total": 6.0,
        "sample_seconds_total": 2.0,
        "commit_seconds_total": 1.0,
    }
    burst = Burst([Trace(0.0, [(1.0, 1.0)], 1.0, 1)], engine=totals)
    assert python_share([burst, burst]) == pytest.approx(0.2)
    assert python_share([Burst(burst.traces)]) is None


def test_numbers_keep_three_digits() -> None:
    assert [number(v) for v in (1234.5, 56.78, 0.891)] == ["1234", "56.8", "0.89"]


# -- ablation ----------------------------------------------------------------------------------


def test_three_plugins_give_eight_configurations() -> None:
    targets = variants(Target(), ["x", "y", "z"])
    assert [t.plugins for t in targets] == [
        (),
        ("x", "y", "z"),
        ("x",),
        ("y",),
        ("z",),
        ("y", "z"),
        ("x", "z"),
        ("x", "y"),
    ]
    assert [t.label for t in targets][:3] == ["none", "all", "only x"]


def test_configurations_that_coincide_run_once() -> None:
    assert [t.plugins for t in variants(Target(), ["x"])] == [(), ("x",)]
    assert len(variants(Target(), ["x", "y"])) == 4


def test_settings_of_absent_plugins_are_left_out() -> None:
    base = Target(flags={"x.k": 1, "y.k": 2, "engine.threads": 1})
    flags = {t.plugins: t.flags for t in variants(base, ["x", "y"])}
    assert flags[()] == {"engine.threads": 1}
    assert flags[("x",)] == {"x.k": 1, "engine.threads": 1}


def test_ablating_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--plugins"):
        variants(Target(), [])


def test_what_a_plugin_bought_alone_and_last() -> None:
    def bursts(seconds: float) -> list[Burst]:
        return [Burst([Trace(0.0, [(seconds, 1.0)], seconds, 1)])]

    measured = {
        (): bursts(12.0),
        ("x",): bursts(6.0),
        ("y",): bursts(4.0),
        ("x", "y"): bursts(3.0),
    }
    rows = {b.plugin: (b.alone.median, b.last.median) for b in bought("xy", measured, "output_tps")}
    assert rows == {"x": (2.0, pytest.approx(4 / 3)), "y": (3.0, 2.0)}


# -- command line ------------------------------------------------------------------------------


@pytest.fixture
def opened(fake_session: Any, monkeypatch: Any) -> Iterator[list[Target]]:
    """The command line with fake sessions, files and tokenizer; yields the targets opened."""
    targets: list[Target] = []

    def opener(target: Target) -> Any:
        targets.append(target)
        return fake_session(1.0 + len(targets), target.plugins or ())

    def encode(text: str, **_: Any) -> list[int]:
        return list(range(len(text.split())))

    tokenizer = SimpleNamespace(load=lambda _: SimpleNamespace(encode=encode))
    module = SimpleNamespace(Tokenizer=tokenizer)
    monkeypatch.setitem(__import__("sys").modules, "interlock.tokenizer", module)
    monkeypatch.setattr("interlock.weights.resolve.resolve", lambda name, **_: name)
    monkeypatch.setattr(bench_run, "open_session", opener)
    return targets


BASE = ["--no-floors", "--prompt-tokens", "8", "--output-tokens", "4", "--repeats", "2"]


def test_run_prints_tables_and_writes_json(opened: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "report.json"
    words = ["bench", "run", "--against", "engine.dtype=float32", "--concurrency", "1,2"]
    assert main([*words, "--out", str(out), *BASE]) == 0
    text = capsys.readouterr().out
    assert "concurrency 1: 1 requests of 8 in, 4 out" in text
    assert "interlock vs engine.dtype=float32" in text
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    assert [r.load.concurrency for r in report.loads] == [1, 2]
    assert [t.sets for t in opened] == [(), ("engine.dtype=float32",)]


def test_every_way_of_setting_reaches_the_worker(opened: Any, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[engine]\nblock_size = 8\n")
    words = ["--config", str(config), "--threads", "1", "--set", "engine.dtype=float32"]
    assert main(["bench", "run", "--json", *words, *BASE]) == 0
    assert opened[0].flags == {
        "engine.block_size": 8,
        "engine.threads": 1,
        "engine.dtype": "float32",
    }


def test_json_is_the_report_alone(opened: Any, capsys: Any) -> None:
    assert main(["bench", "run", "--json", *BASE]) == 0
    assert json.loads(capsys.readouterr().out)["loads"][0]["load"]["prompt_tokens"] == 8
    assert len(opened) == 1


def test_compare_transformers_has_the_agreed_load(opened: Any, capsys: Any) -> None:
    words = ["bench", "compare-transformers", "--json", "--no-floors", "--repeats", "1"]
    assert main([*words, "--warmup", "0"]) == 0
    loads = [r["load"] for r in json.loads(capsys.readouterr().out)["loads"]]
    assert [(x["concurrency"], x["prompt_tokens"], x["output_tokens"]) for x in loads] == [
        (1, 1024, 128),
        (4, 1024, 128),
        (16, 1024, 128),
    ]
    assert [t.kind for t in opened] == ["engine", "transformers"]


def test_an_unwritable_result_is_found_before_measuring(opened: Any, capsys: Any) -> None:
    assert main(["bench", "run", "--out", "/nonexistent/x.json", *BASE]) == 2
    assert "--out /nonexistent/x.json" in capsys.readouterr().err
    assert opened == []


@pytest.mark.parametrize("value", ["0", "1,x", ""])
def test_a_wrong_concurrency_is_a_usage_error(value: str, capsys: Any) -> None:
    assert main(["bench", "run", "--concurrency", value]) == 2
    assert "--concurrency" in capsys.readouterr().err


def test_floor_rows_are_left_out_without_floors(two: Any) -> None:
    assert floor_rows(two[0].loads[0])[1] == []


def test_ablate_prints_what_each_plugin_bought(opened: Any, monkeypatch: Any, capsys: Any) -> None:
    settings = Settings(plugins=("x", "y"))
    monkeypatch.setattr("interlock.cli.bench.settings_of", lambda _: settings)
    assert main(["bench", "ablate", "--plugins", "x,y", *BASE]) == 0
    text = capsys.readouterr().out
    assert [t.plugins for t in opened] == [(), ("x", "y"), ("x",), ("y",)]
    # The fake sessions take 2, 3, 4 and 5 seconds per token, in the order of opening.
    assert "x\toutput\t0.50 [0.50..0.50]\t1.67 [1.67..1.67]" in text
    assert "x\tcalls_total" in text
