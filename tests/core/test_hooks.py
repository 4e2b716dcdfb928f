"""One test per hook of `interlock.hookspec`: when it is called, how often, and with what."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import attrs
import httpx
import pytest
import torch

from hybridsim import HybridRunner
from interlock import ops
from interlock.cli import main
from interlock.cli.parser import parse
from interlock.engine.engine import Engine
from interlock.engine.outputs import StepStats
from interlock.engine.request import Request, SamplingParams
from interlock.errors import ConfigError, PluginError, RequestError
from interlock.extension import STATE_GRID, ExpertLayer, Match, UnfinalizedExperts
from interlock.hookspec import hookimpl
from interlock.layers.moe import DenseExperts
from interlock.plugins import Plugins
from interlock.settings import EngineSettings, Settings, load_settings, option
from plugins_for_tests import Base, Bias, LookupDrafter, StrideLimit
from server.harness import serving
from sim import (
    VOCAB,
    SimPlugin,
    SimRunner,
    entries_of,
    expected_tokens,
    greedy,
    request,
    run,
    sim_engine,
    tokens_of,
)
from tinykimi import write_tiny_kimi
from tinymodels import write_tiny_hf


@attrs.frozen(kw_only=True)
class Section:
    size: int = option(1, "a size")


class Configured(Base):
    """Records what it is configured with."""

    def __init__(self, calls: list) -> None:
        super().__init__()
        self.calls = calls

    @hookimpl
    def interlock_settings(self):
        self.calls.append("settings")
        return Section

    @hookimpl
    def interlock_configure(self, settings, section):
        self.calls.append((settings, section))


# -- configuration -------------------------------------------------------------------------------


def test_hook_settings(site):
    """Called once for each plugin that is asked for, to learn the section; nobody else's."""
    site.add(
        "sized",
        "import attrs\nfrom interlock.hookspec import hookimpl\n"
        "from interlock.settings import option\n"
        "@attrs.frozen(kw_only=True)\nclass Section:\n    size: int = option(1, 'a size')\n"
        "class Plugin:\n    api_version = 1\n    calls = 0\n"
        "    @hookimpl\n    def interlock_settings(self):\n"
        "        Plugin.calls += 1\n        return Section\n",
    )
    settings = load_settings(["sized"], sets=["sized.size=3"])
    assert settings.section("sized").size == 3
    assert settings.source("sized.size") == "--set"
    assert sys.modules["interlock_sized"].Plugin.calls == 1
    with pytest.raises(ConfigError, match=r"unknown section 'sized'"):
        load_settings([], sets=["sized.size=3"])


def test_hook_configure():
    """Called once, with the final settings and the plugin's own section, before the runner."""
    calls: list = []
    settings = Settings(sections={"mine": Section(size=5), "other": Section(size=6)})

    class Runner(SimPlugin):
        @hookimpl
        def interlock_runner(self):
            calls.append("runner")
            return self.runner

    plugins = Plugins.of({"mine": Configured(calls), "sim": Runner(SimRunner())})
    Engine(settings, plugins=plugins)
    assert calls == [(settings, Section(size=5)), "runner"]


def test_hook_configure_may_refuse():
    class Refuses(Base):
        @hookimpl
        def interlock_configure(self, section):
            raise ConfigError("mine.size: 5 needs a device with 5 cores; use at most 4")

    with pytest.raises(ConfigError, match="use at most 4"):
        sim_engine(plugins={"mine": Refuses()})


COMMANDS = """
from interlock.hookspec import hookimpl

class Plugin:
    api_version = 1
    @hookimpl
    def interlock_commands(self, subparsers):
        parser = subparsers.add_parser("greet", help="say hello")
        parser.add_argument("--loud", action="store_true")
        parser.set_defaults(run=lambda args: print("HELLO" if args.loud else "hello"))
"""


def test_hook_commands(site, capsys):
    """Called in the command-line process only for plugins that are asked for; needs no torch."""
    site.add("greeter", COMMANDS)
    assert main(["greet", "--loud", "--plugins", "greeter"]) == 0
    assert capsys.readouterr().out == "HELLO\n"
    with pytest.raises(ConfigError, match="unknown command 'greet'"):
        parse(["greet", "--loud"])
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from interlock.cli import main\n"
        "code = main(['greet', '--plugins', 'greeter'])\n"
        "sys.exit(code or 'torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- model and kernels, with a real tiny model -----------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_hf(tmp_path_factory.mktemp("tiny") / "model", "LlamaForCausalLM")


def tiny_engine(path, *plugins: object) -> Engine:
    named = {f"p{i}": plugin for i, plugin in enumerate(plugins)}
    settings = EngineSettings(model=str(path), dtype="float64", num_blocks=8)
    return Engine(Settings(engine=settings), plugins=Plugins.of(named))


def tiny_tokens(engine: Engine) -> list[int]:
    engine.add(request("r", [5, 6, 7], greedy(6)))
    return tokens_of(run(engine)["r"])


def test_hook_models(tiny, tmp_path):
    """A class by architecture name; called once. A name that the core has is refused."""
    from interlock.models.registry import MODELS

    calls = []

    class Models(Base):
        def __init__(self, name):
            super().__init__()
            self.name = name

        @hookimpl
        def interlock_models(self):
            calls.append(self.name)
            return {self.name: MODELS["LlamaForCausalLM"]}

    config = {"architectures": ["NovelForCausalLM"]}
    novel = write_tiny_hf(tmp_path / "novel", "LlamaForCausalLM", config=config)
    engine = tiny_engine(novel, Models("NovelForCausalLM"))
    assert calls == ["NovelForCausalLM"]
    assert engine.info.architecture == "NovelForCausalLM"
    assert tiny_tokens(engine) == tiny_tokens(tiny_engine(tiny))
    with pytest.raises(PluginError, match="LlamaForCausalLM"):
        tiny_engine(tiny, Models("LlamaForCausalLM"))
    with pytest.raises(PluginError, match="'p0' and 'p1' both give 'NovelForCausalLM'"):
        tiny_engine(novel, Models("NovelForCausalLM"), Models("NovelForCausalLM"))


def test_hook_kernels(tiny):
    """Called once with device and dtype; the op that it gives runs, and is named by the engine."""
    calls, runs = [], []

    class Kernels(Base):
        @hookimpl
        def interlock_kernels(self, device, dtype):
            calls.append((device, dtype))
            plain = ops.build(device, dtype, {}).rms_norm

            def rms_norm(*arguments):
                runs.append(len(arguments))
                return plain(*arguments)

            return {("rms_norm", "cpu"): rms_norm}

    engine = tiny_engine(tiny, Kernels())
    assert calls == [(torch.device("cpu"), torch.float64)]
    assert tiny_tokens(engine) == tiny_tokens(tiny_engine(tiny))
    assert runs
    with pytest.raises(PluginError, match="both give"):
        tiny_engine(tiny, Kernels(), Kernels())


class DenseMethod:
    """The plainest `interlock.extension.LinearMethod`."""

    def create_weights(self, in_features, out_features):
        self.shape = (out_features, in_features)

    def load(self, parts, bias):
        self.weight = torch.cat([part.dense(torch.float64) for part in parts])
        self.bias = bias
        assert self.weight.shape == self.shape

    def apply(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


def test_hook_linear_method(tiny):
    """Called once per linear layer; None leaves a layer to the core; two owners are refused."""
    seen: dict[str, tuple] = {}

    class Linears(Base):
        @hookimpl
        def interlock_linear_method(self, name, in_features, out_features, weight_format, dtype):
            assert name not in seen
            seen[name] = (in_features, out_features, weight_format, dtype)
            return DenseMethod() if ".mlp." in name else None

    tokens = tiny_tokens(tiny_engine(tiny, Linears()))
    assert tokens == tiny_tokens(tiny_engine(tiny))
    assert seen["model.layers.0.mlp.gate_up_proj"] == (64, 256, "F32", torch.float64)
    assert seen["model.layers.1.self_attn.qkv_proj"] == (64, 128, "F32", torch.float64)
    seen.clear()

    class Rival(Base):
        @hookimpl
        def interlock_linear_method(self, name):
            return DenseMethod()

    with pytest.raises(PluginError, match="'p0' and 'p1' both claim interlock_linear_method"):
        tiny_engine(tiny, Linears(), Rival())


def test_hook_expert_method(tmp_path):
    """Called once per layer with routed experts; None leaves it to the core; one owner."""
    folder = str(write_tiny_kimi(tmp_path / "m"))
    settings = Settings(engine=EngineSettings(model=folder, dtype="float64", max_model_len=64))
    seen: list[ExpertLayer] = []

    class Doubled:
        """The core's experts, with the result left unfinalized and twice as large."""

        def __init__(self, layer):
            self.inner = DenseExperts(layer, ops.build(torch.device("cpu"), torch.float64, {}))
            self.loaded: list[tuple] = []

        def load(self, matrix):
            self.loaded = [matrix(0, part).info.shape for part in ("w1", "w3", "w2")]
            self.inner.load(matrix)

        def apply(self, x, weights, ids):
            rows = self.inner.apply(x, weights, ids)
            names = torch.arange(len(x), dtype=torch.int32)[:, None]
            return UnfinalizedExperts(rows, torch.full_like(weights[:, :1], 2.0), names)

    class Experts(Base):
        made: ClassVar[list] = []

        @hookimpl
        def interlock_expert_method(self, layer):
            seen.append(layer)
            self.made.append(Doubled(layer))
            return None if ".layers.1." in layer.name else self.made[-1]

    def tokens(**plugins):
        engine = Engine(settings, plugins=Plugins.of(plugins))
        engine.add(Request("r", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=6)))
        found: list[int] = []
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                found += output.token_ids
        return found

    # The norm behind the sum makes twice as large the same, but for its epsilon.
    assert tokens(e=Experts()) == tokens()
    assert [layer.name for layer in seen] == [
        f"language_model.model.layers.{i}.block_sparse_moe.experts" for i in range(1, 6)
    ]
    first = seen[0]
    assert (first.num_experts, first.top, first.size, first.inner) == (8, 3, 32, 96)
    assert (first.activation, first.weight_format) == (("situ", 4.0, 25.0), "MXFP4")
    assert first.unfinalized_capacity > 0
    assert Experts.made[1].loaded == [(96, 32), (96, 32), (32, 96)]

    class Rival(Experts):
        pass

    with pytest.raises(PluginError, match="'p' and 'q' both claim interlock_expert_method"):
        tokens(p=Experts(), q=Rival())

    class Wrong(Base):
        @hookimpl
        def interlock_expert_method(self, layer):
            return object()

    with pytest.raises(PluginError, match=r"'w': object has no method load\(\)"):
        tokens(w=Wrong())


def test_hook_fingerprint():
    """Called once; any change of a plugin's text, or of the plugins that have one, shows."""

    class Format(Base):
        def __init__(self, text):
            super().__init__()
            self.text = text

        @hookimpl
        def interlock_fingerprint(self, settings):
            assert isinstance(settings, Settings)
            self.counts["calls"] += 1
            return self.text

    def fingerprint(**plugins):
        return sim_engine(plugins=plugins).info.fingerprint

    first = Format("8 bits")
    prints = [
        fingerprint(),
        fingerprint(a=first),
        fingerprint(a=Format("4 bits")),
        fingerprint(b=Format("8 bits")),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(a=Format("8 bits")) == prints[1]
    assert first.counts["calls"] == 1


def test_hook_runner():
    """Called once, instead of loading a model. Exclusive."""
    runner = SimRunner(num_blocks=9)
    engine = sim_engine(runner, model="there/is/no/such/model")
    assert engine.runner is runner
    assert engine.info.num_blocks == 9
    with pytest.raises(PluginError, match="'sim' and 'second' both claim interlock_runner"):
        sim_engine(plugins={"second": SimPlugin(runner)})


# -- objects handed over -------------------------------------------------------------------------


class Source(Base):
    """Has the first ``size`` tokens of everything, in nobody's blocks."""

    def __init__(self, name, size, calls):
        super().__init__()
        self.name, self.size, self.calls = name, size, calls

    @hookimpl
    def interlock_kv_source(self, engine):
        assert engine.scheduler.memory.pool.num_free
        return self

    def match(self, request, start, stop):
        self.calls.append((self.name, "match", start, stop))
        return Match(max(0, self.size - start))

    def settle(self, request, start, num_tokens):
        self.calls.append((self.name, "settle", start, num_tokens))
        request.hold(self.name)


def test_hook_kv_source():
    """Sources chain in order; each settles once per admission, also with 0."""
    calls: list = []
    sources = {"a": Source("a", 4, calls), "b": Source("b", 8, calls), "c": Source("c", 6, calls)}
    engine = sim_engine(plugins=sources)
    engine.add(request("r", list(range(11)), greedy(2)))
    engine.step()
    assert calls == [
        ("a", "match", 0, 10),
        ("b", "match", 4, 10),
        ("c", "match", 8, 10),
        ("a", "settle", 0, 4),
        ("b", "settle", 4, 4),
        ("c", "settle", 8, 0),
    ]
    assert engine.scheduler.requests["r"].num_computed_tokens == 8
    assert engine.runner.plans == []


def test_hook_kv_source_an_answer_beyond_what_was_asked_ends_that_request_alone():
    class TooMuch(Source):
        def match(self, request, start, stop):
            return Match(stop - start + 1) if request.id == "bad" else None

        def settle(self, request, start, num_tokens):
            pass

    engine = sim_engine(plugins={"greedy": TooMuch("greedy", 0, [])})
    engine.add(request("bad", [1, 2, 3]))
    engine.add(request("good", [1, 2, 3]))
    outputs = run(engine)
    assert "plugin 'greedy': match(0, 2) answered 3 tokens" in outputs["bad"][-1].error
    assert tokens_of(outputs["good"]) == expected_tokens([1, 2, 3], 8)


@pytest.mark.parametrize("method", ["match", "settle"])
def test_hook_kv_source_an_error_ends_that_request_alone_and_names_the_plugin(method):
    class Breaks(Source):
        def match(self, request, start, stop):
            return self.fail(request, "match")

        def settle(self, request, start, num_tokens):
            self.fail(request, "settle")

        def fail(self, request, where):
            if (request.id, where) == ("bad", method):
                raise LookupError("no such shard")

    engine = sim_engine(plugins={"breaks": Breaks("breaks", 0, [])})
    engine.add(request("bad", [1, 2, 3]))
    engine.add(request("good", [1, 2, 3]))
    outputs = run(engine)
    assert f"no such shard (plugin 'breaks', KVSource.{method})" in outputs["bad"][-1].error
    assert tokens_of(outputs["good"]) == expected_tokens([1, 2, 3], 8)
    assert engine.scheduler.memory.pool.usage == 0


def test_hook_state_exports():
    """A slot of the plugin holds the state at the position asked for once the step is complete."""
    asked: list[tuple[int, int]] = []

    class Exports(Base):
        @hookimpl
        def interlock_state_exports(self, engine):
            self.slots = engine.scheduler.memory.states.allocate(2)
            return self

        def plan(self, request, start, stop):
            asked.append((start, stop))
            grid = range(start + STATE_GRID, stop, STATE_GRID)
            return list(zip(grid, self.slots, strict=False))

        def held_states(self):
            return self.slots

    runner, exports = HybridRunner(), Exports()
    engine = sim_engine(runner, plugins={"exports": exports})
    prompt = [i * 7 % 64 for i in range(40)]
    engine.add(request("r", prompt, greedy(3)))
    assert tokens_of(run(engine, plugins={"exports": exports})["r"]) == expected_tokens(prompt, 3)
    # Asked for the prefill row alone, and not for decode rows.
    assert asked == [(0, 40)]
    found = [runner.states[slot] for slot in exports.slots]
    assert found == [entries_of(prompt)[15], entries_of(prompt)[31]]


def test_hook_chunk_limit():
    """All limits apply, in order, to every row; ``start`` skips a request in this step."""
    asked: list[tuple[str, int, int]] = []

    class Skips(Base):
        @hookimpl
        def interlock_chunk_limit(self):
            return self

        def clip(self, request, start, end):
            asked.append((request.id, start, end))
            waits = request.id == "later" and len(runner.plans) < 2
            return start if waits else end

    runner = SimRunner()
    limits = {"five": StrideLimit(5), "skips": Skips()}
    engine = sim_engine(runner, plugins=limits, max_num_batched_tokens=8)
    engine.add(request("later", [9], greedy(1)))
    engine.add(request("r", list(range(12)), greedy(2)))
    outputs = run(engine)
    assert tokens_of(outputs["r"]) == expected_tokens(list(range(12)), 2)
    assert tokens_of(outputs["later"]) == expected_tokens([9], 1)
    assert runner.plans[:2] == [[("r", 0, 5)], [("r", 5, 12)]]
    assert ("later", 0, 1) in runner.plans[2]
    # The second limit sees what the first has left.
    assert ("r", 0, 5) in asked


def test_hook_drafter():
    """Asked once per step, after commit, for running requests that decode; drafts are verified."""
    right = expected_tokens([1, 2], 9)

    class Knows(LookupDrafter):
        def input_slots(self, request):
            self.counts["slots"] += 1
            return 0

        def propose(self, requests):
            self.counts["proposals"] += 1
            assert all(not r.draft_tokens and r.num_output_tokens for r in requests)
            done = [r.num_output_tokens for r in requests]
            return [[*right[n : n + 2], (right[n + 2] + 1) % 64] for n in done if n < 7] or [[]]

    runner, drafter = SimRunner(), Knows()
    engine = sim_engine(runner, plugins={"knows": drafter})
    engine.add(request("r", [1, 2], greedy(9)))
    assert tokens_of(run(engine)["r"]) == right
    # The prompt, then three accepted tokens per step (two drafts and the one after them), ...
    assert [plan[0][1:] for plan in runner.plans][:3] == [(0, 2), (2, 6), (5, 9)]
    assert drafter.counts["accepted_total"] > 0
    assert drafter.counts["slots"] > 0
    assert drafter.counts["proposals"] == len(runner.plans) - 1


def test_hook_logits_processor():
    """All apply in order, before sampling, to every row that samples; an error ends its request."""

    class Breaks(Base):
        @hookimpl
        def interlock_logits_processor(self):
            return self

        def apply(self, requests, offsets, logits):
            assert logits.shape == (len(requests), 64)
            assert logits.dtype == torch.float32
            if any(request.id == "bad" for request in requests):
                raise ValueError("no such grammar")
            return logits

    first, second = Bias(7, 50), Bias(9, 100)
    engine = sim_engine(plugins={"first": first, "second": second, "breaks": Breaks()})
    engine.add(request("good", [1, 2], greedy(4)))
    engine.add(request("bad", [1, 2], greedy(4)))
    outputs = run(engine)
    assert tokens_of(outputs["good"]) == [9, 9, 9, 9]
    assert "no such grammar" in outputs["bad"][-1].error
    assert "plugin 'breaks', LogitsProcessor.apply" in outputs["bad"][-1].error
    assert first.counts["rows_total"] == second.counts["rows_total"] >= 4


def test_hook_check_options():
    """Called once per request that has options for the plugin; refuses that request alone."""

    class Checks(Base):
        @hookimpl
        def interlock_check_options(self, request, options):
            self.counts[request.id] += 1
            if options != {"good": 1}:
                raise RequestError("plugins.mine: only good is known", param="plugins.mine")

    mine, other = Checks(), Checks()
    engine = sim_engine(plugins={"mine": mine, "other": other})
    for name, extras in (("a", {"mine": {"good": 1}}), ("b", {}), ("c", {"cache_salt": "x"})):
        asked = request(name, [1, 2, 3], greedy(2))
        asked.extras = extras
        engine.add(asked)
    bad = request("d", [1, 2, 3], greedy(2))
    bad.extras = {"mine": {"bad": 1}}
    with pytest.raises(RequestError, match="only good is known"):
        engine.add(bad)
    assert set(run(engine)) == {"a", "b", "c"}
    assert (dict(mine.counts), dict(other.counts)) == ({"a": 1, "d": 1}, {})


def test_hook_counters():
    """Asked for statistics; shown by `Engine.stats` and `Engine.plugin_report`."""

    class Counts(Base):
        @hookimpl
        def interlock_counters(self, engine):
            return {"steps_total": engine._stats.steps_total, "things_now": 2}

    engine = sim_engine(plugins={"mine": Counts()})
    engine.add(request("r", [1], greedy(3)))
    run(engine)
    assert engine.stats().plugin_counters == {"mine": {"steps_total": 3.0, "things_now": 2.0}}
    (report,) = [r for r in engine.plugin_report() if r.name == "mine"]
    assert report.counters["steps_total"] == 3.0


@pytest.mark.parametrize("answer", [None, {"x": "many"}, 3])
def test_hook_counters_that_fail_are_logged_and_end_nothing(answer, caplog):
    class Counts(Base):
        @hookimpl
        def interlock_counters(self):
            if answer is None:
                raise RuntimeError("lost count")
            return answer

    engine = sim_engine(plugins={"mine": Counts()})
    assert engine.stats().plugin_counters == {}
    assert "no plugin counters" in caplog.text
    engine.add(request("r", [1], greedy(3)))
    assert tokens_of(run(engine)["r"]) == expected_tokens([1], 3)


# -- warm ----------------------------------------------------------------------------------------


class Warm(Base):
    """Records every warm call: its name and what matters of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def of(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == name]

    @hookimpl
    def interlock_poll(self, engine):
        self.calls.append(("poll",))

    @hookimpl
    def interlock_kv_committed(self, engine, spans):
        table = [len(request.block_table) for request, *_ in spans]
        assert all(table), "the blocks are still there"
        self.calls.append(("kv_committed", [(r.id, a, b) for r, a, b in spans]))

    @hookimpl
    def interlock_reclaim(self, engine, num_blocks, num_states):
        self.calls.append(("reclaim", num_blocks, num_states))

    @hookimpl
    def interlock_requests_finished(self, engine, requests):
        held = [bool(request.block_table) for request in requests]
        names = [(r.id, r.finish_reason) for r in requests]
        self.calls.append(("requests_finished", names, held))

    @hookimpl
    def interlock_requests_preempted(self, engine, requests):
        assert not any(request.block_table for request in requests)
        self.calls.append(("requests_preempted", [r.id for r in requests]))

    @hookimpl
    def interlock_step_done(self, engine, stats):
        assert isinstance(stats, StepStats)
        self.calls.append(("step_done", stats.num_rows, stats.num_tokens, stats.num_output_tokens))


def test_hook_poll():
    """First in each step, also when no request can run."""
    warm = Warm()
    engine = sim_engine(plugins={"warm": warm})
    held = request("held", [1], greedy(1))
    held.hold("somebody")
    engine.add(held)
    for _ in range(3):
        assert engine.step() == []
    assert warm.calls == [("poll",)] * 3


def test_hook_poll_may_release_a_hold_for_the_same_step():
    class Releases(Base):
        @hookimpl
        def interlock_poll(self, engine):
            for waiting in engine.scheduler.waiting:
                waiting.release("somebody")

    engine = sim_engine(plugins={"releases": Releases()})
    held = request("held", [1], greedy(1))
    held.hold("somebody")
    engine.add(held)
    assert tokens_of(engine.step()) == expected_tokens([1], 1)


def test_hook_kv_committed():
    """Once per step that computed something, with accepted tokens only, before blocks are freed."""
    warm = Warm()

    class Wrong(LookupDrafter):
        def propose(self, requests):
            right = [expected_tokens(r.token_ids, 1)[0] for r in requests]
            return [[token, (token + 1) % 64, 3] for token in right]

    engine = sim_engine(plugins={"wrong": Wrong(slots=0), "warm": warm}, max_num_batched_tokens=8)
    engine.add(request("r", list(range(10)), greedy(4)))
    run(engine)
    spans = [call[0] for call in warm.of("kv_committed")]
    # Of three drafts only the first is right, so its step commits two tokens: it and the last one.
    assert spans[:3] == [[("r", 0, 8)], [("r", 8, 10)], [("r", 10, 12)]]
    assert spans[-1][0][2] <= 13
    last = [call[0] for call in warm.calls[-3:]]
    assert last == ["kv_committed", "requests_finished", "step_done"]


def test_hook_reclaim():
    """Called with the number of blocks that are missing, before anybody is preempted."""

    class Hoards(Base):
        @hookimpl
        def interlock_kv_source(self, engine):
            self.pool = engine.scheduler.memory.pool
            self.mine = self.pool.allocate(3)

        @hookimpl
        def interlock_reclaim(self, num_blocks):
            self.counts["asked"] += num_blocks
            self.pool.drop([self.mine.pop() for _ in range(min(num_blocks, len(self.mine)))])

    warm, hoards = Warm(), Hoards()
    engine = sim_engine(SimRunner(6, 4), plugins={"hoards": hoards, "warm": warm})
    engine.add(request("r", [1] * 8, greedy(12)))
    while engine.has_work():
        engine.step()
        engine.scheduler.check([hoards.mine])
    assert engine.stats().preemptions_total == 0
    # Three of six blocks are free: the prompt takes two, output tokens the third, then two more.
    assert warm.of("reclaim") == [(1, 0), (1, 0)]
    assert len(hoards.mine) == 1


def test_hook_requests_finished():
    """Each request exactly once, whatever ended it, while its blocks are still held."""
    warm, runner = Warm(), SimRunner()
    runner.nan.add("nan")
    engine = sim_engine(runner, plugins={"warm": warm})
    engine.add(request("late", [1], greedy(9), deadline=1.0))
    for name in ("length", "abort", "nan"):
        engine.add(request(name, [1, 2], greedy(3)))
    engine.step()
    engine.abort("abort")
    run(engine)
    assert warm.of("requests_finished") == [
        ([("late", "timeout")], [False]),
        ([("nan", "error")], [True]),
        ([("abort", "abort")], [True]),
        ([("length", "length")], [True]),
    ]


def test_hook_requests_preempted():
    """After the plan that took their memory, all of a step together, in order."""
    warm = Warm()
    engine = sim_engine(SimRunner(num_blocks=6, block_size=4), plugins={"warm": warm})
    for name in "abc":
        engine.add(request(name, [1, 2, 3, 4, 5], greedy(9)))
    outputs = run(engine)
    preempted = [name for (names,) in warm.of("requests_preempted") for name in names]
    assert preempted
    assert len(preempted) == engine.stats().preemptions_total
    assert "a" not in preempted
    steps = [call[0] for call in warm.calls]
    assert steps[steps.index("requests_preempted") + 1] in ("kv_committed", "requests_finished")
    for name in "abc":
        assert tokens_of(outputs[name]) == expected_tokens([1, 2, 3, 4, 5], 9)


def test_hook_close(caplog):
    """Once, when all requests have ended; one plugin's failure keeps nobody from closing."""

    class Closes(Base):
        closed: ClassVar[list] = []

        @hookimpl
        def interlock_close(self, engine):
            self.closed.append([len(engine.scheduler.requests), engine.stats().kv_usage])

    class Breaks(Base):
        @hookimpl
        def interlock_close(self):
            raise OSError("socket is gone")

    engine = sim_engine(plugins={"breaks": Breaks(), "closes": Closes()})
    engine.add(request("r", [1, 2], greedy(20)))
    engine.step()
    engine.close()
    assert Closes.closed == [[0, 0.0]]
    assert "'breaks' failed in interlock_close" in caplog.text


def test_a_drafter_that_fails_for_one_request_ends_that_one():
    class Fragile(LookupDrafter):
        def propose(self, requests):
            if any(r.id == "bad" for r in requests):
                raise ValueError("cannot draft")
            return [[VOCAB] if r.id == "far" else [] for r in requests]

    engine = sim_engine(plugins={"fragile": Fragile(slots=0)})
    for name in ("a", "bad", "far", "b"):
        engine.add(request(name, [1, 2], greedy(4)))
    outputs = run(engine)
    assert "cannot draft" in outputs["bad"][-1].error
    assert "plugin 'fragile'" in outputs["bad"][-1].error
    assert "64 is out of vocabulary" in outputs["far"][-1].error
    for name in "ab":
        assert tokens_of(outputs[name]) == expected_tokens([1, 2], 4)


def test_hook_step_done():
    """Last in each step that computed something, with what it did."""
    warm = Warm()
    engine = sim_engine(plugins={"warm": warm}, max_num_batched_tokens=6)
    engine.add(request("r", list(range(10)), greedy(2)))
    run(engine)
    engine.step()
    assert warm.of("step_done") == [(1, 6, 0), (1, 4, 1), (1, 1, 1)]
    assert warm.calls[-2:] == [("step_done", 1, 1, 1), ("poll",)]


# -- the HTTP process ------------------------------------------------------------------------------

ROUTES = """
import sys
from typing import ClassVar
from interlock.hookspec import hookimpl
from sanic.response import json

class Plugin:
    api_version = 1
    calls = 0
    @hookimpl
    def interlock_routes(self, app):
        self.calls += 1
        @app.get("/mine")
        async def mine(request):
            return json({"calls": self.calls, "torch": "torch" in sys.modules})
"""


def test_hook_routes(site, monkeypatch):
    """Called once in the HTTP process, which has no torch; the route asks for the key."""
    site.add("routed", ROUTES)
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    with serving(plugins="routed", server__api_key="secret") as server:
        assert httpx.get(f"{server.url}/mine", timeout=60).status_code == 401
        key = {"authorization": "Bearer secret"}
        answer = httpx.get(f"{server.url}/mine", headers=key, timeout=60)
        assert answer.json() == {"calls": 1, "torch": False}


# -- all of them in order --------------------------------------------------------------------------


class Everything(SimPlugin):
    """Every hook that an engine calls over the simulated runner, without any effect."""

    @hookimpl
    def interlock_configure(self, section):
        pass

    @hookimpl
    def interlock_fingerprint(self):
        return "none"

    @hookimpl
    def interlock_kv_source(self):
        pass

    @hookimpl
    def interlock_chunk_limit(self):
        pass

    @hookimpl
    def interlock_state_exports(self):
        pass

    @hookimpl
    def interlock_drafter(self):
        pass

    @hookimpl
    def interlock_logits_processor(self):
        pass

    @hookimpl
    def interlock_counters(self):
        return {"calls_total": 1}

    @hookimpl
    def interlock_poll(self):
        pass

    @hookimpl
    def interlock_kv_committed(self, spans):
        pass

    @hookimpl
    def interlock_reclaim(self, num_blocks):
        pass

    @hookimpl
    def interlock_requests_finished(self, requests):
        pass

    @hookimpl
    def interlock_requests_preempted(self, requests):
        pass

    @hookimpl
    def interlock_step_done(self, stats):
        pass


GOLDEN = """
build     configure all
build     runner sim
build     runner all
build     kv_source all
build     state_exports all
build     chunk_limit all
build     logits_processor all
build     drafter all
build     fingerprint all
step 1    poll all
step 1    kv_committed all
step 1    step_done all
step 2    poll all
step 2    reclaim all
step 2    requests_preempted all
step 2    kv_committed all
step 2    step_done all
step 3    poll all
step 3    requests_finished all
step 3    kv_committed all
step 3    requests_finished all
step 3    step_done all
counters  counters all
"""


def test_the_whole_life_of_an_engine_as_an_ordered_trace(capsys):
    """Two requests of two blocks in a pool of three: the second is preempted, then cancelled."""

    class Silent(Everything):
        @hookimpl
        def interlock_runner(self):
            return None

    runner = SimRunner(num_blocks=3, block_size=4)
    settings = Settings(engine=EngineSettings(trace_hooks=True, max_num_batched_tokens=16))
    lines: list[str] = []

    def flush(stage: str) -> None:
        for line in capsys.readouterr().err.splitlines():
            hook, plugin, *_ = line.split()
            lines.append(f"{stage:9} {hook.removeprefix('interlock_')} {plugin.strip('[]')}")

    plugins = Plugins.of({"sim": SimPlugin(runner), "all": Silent(runner)})
    engine = Engine(settings, plugins=plugins)
    flush("build")
    engine.add(request("first", [1, 2, 3, 4], greedy(3)))
    engine.add(request("second", [5, 6, 7, 8], greedy(8)))
    for step in range(1, 4):
        if step == 3:
            engine.abort("second")
        engine.step()
        flush(f"step {step}")
    engine.stats()
    flush("counters")
    assert "\n" + "\n".join(lines) + "\n" == GOLDEN
