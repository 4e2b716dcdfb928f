"""The plugin in an engine: greedy tokens, ranks, deferral, counters, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hybridsim import StateCache
from interlock.engine.engine import Engine
from interlock.engine.request import Request, SamplingParams
from interlock.errors import ConfigError, WeightsError
from interlock.settings import load_settings
from interlock_mxfp4 import Mxfp4
from k3nano.play import drain, engine, greedy, run
from parallel.ranks import generate
from plugins_for_tests import LookupDrafter
from tinykimi import write_tiny_kimi
from tinymodels import write_tiny_hf

NANO = "k3-nano"
COUNT = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [
        torch.randint(256, 4096, (n,), generator=random).tolist() for n in (1, 16, 17, 40, 64, 129)
    ]


def tokens(model, prompts, plugins=(), sets=(), **settings):
    """Greedy tokens of all prompts at once, and the engine's counters of the plugin."""
    flags = {"engine.model": model, "engine.max_model_len": 512, "engine.num_blocks": 800,
             "engine.threads": 1} | {f"engine.{k}": v for k, v in settings.items()}  # fmt: skip
    built = Engine(load_settings(list(plugins), flags=flags, sets=list(sets)))
    found = run(built, prompts, COUNT)
    counters = {r.name: r.counters for r in built.plugin_report()}
    built.close()
    return found, counters.get("mxfp4", {})


@pytest.fixture(scope="module")
def oracle(prompts):
    """Alone, every plugin off, in float64."""
    built = engine(NANO, max_num_seqs=1, max_num_batched_tokens=512)
    return [run(built, [prompt], COUNT)[0] for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("finalize", ["deferred", "eager"])
def test_greedy_tokens_are_those_of_the_bare_core(prompts, oracle, dtype, finalize):
    found, counters = tokens(
        NANO, prompts, ["mxfp4"], [f"mxfp4.finalize={finalize}"], dtype=dtype,
        max_num_batched_tokens=64,
    )  # fmt: skip
    assert found == oracle
    assert counters["calls_total"] > 0
    other = {"deferred": "eager", "eager": "deferred"}[finalize]
    assert counters[f"finalize_{finalize}_total"] == counters["calls_total"]
    assert counters[f"finalize_{other}_total"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_deferred_and_eager_give_the_same_bits(prompts, dtype):
    """Log-probabilities of every prompt token, through all layers."""
    found = []
    for finalize in ("deferred", "eager"):
        flags = {"engine.model": NANO, "engine.dtype": dtype, "engine.max_model_len": 256}
        built = Engine(load_settings(["mxfp4"], flags=flags, sets=[f"mxfp4.finalize={finalize}"]))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        built.add(Request("r", list(prompts[-1]), params))
        outputs = []
        while built.has_work():
            outputs += built.step()
        found.append([each.logprob for each in outputs[-1].prompt_logprobs[1:]])
    assert len(found[0]) == len(prompts[-1]) - 1
    assert found[0] == found[1]


def test_deferral_is_active_before_any_step_shows_it(capsys):
    """It is announced from what was chosen, before weights are loaded, and then counted.

    vLLM PR 53327: a check of an object that exists only after loading had switched it off.
    """
    said_before_loading: list[bool] = []

    class Watching(Mxfp4):
        def interlock_expert_method(self, layer):
            method = super().interlock_expert_method(layer)
            said_before_loading.append("finalization is deferred" in capsys.readouterr().err)
            return method

        interlock_expert_method.interlock_impl = Mxfp4.interlock_expert_method.interlock_impl

    built = engine(NANO, {"mxfp4": Watching()})
    # Once, with the first layer.
    assert said_before_loading == [True] + [False] * (len(said_before_loading) - 1)
    run(built, [[300, 400, 500]], 4)
    (report,) = built.plugin_report()
    layers = len(said_before_loading)
    assert report.counters["finalize_deferred_total"] == 4 * layers
    assert report.counters["finalize_eager_total"] == 0


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_any_number_of_ranks(prompts, oracle, tp):
    few = prompts[1::2]
    params = [{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}] * len(few)
    answer = generate(NANO, few, params, tp=tp, plugins=["mxfp4"], max_num_batched_tokens=64)
    assert answer["tp"] == tp
    assert answer["tokens"] == oracle[1::2]


@pytest.mark.parametrize("tp", [2, 3])
def test_shares_end_at_whole_groups(tmp_path, tp):
    """MXF-03: an inner size of three groups at two ranks, and of 90 (2880) at three."""
    inner = {2: 96, 3: 2880}[tp]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6} if tp == 3 else {}
    folder = write_tiny_kimi(
        tmp_path / "m", moe_intermediate_size=inner, num_experts=4, num_experts_per_token=2,
        linear={"num_heads": 6} if tp == 3 else None, **heads,
    )  # fmt: skip
    asked = [[1, 2, 3, 4, 5, 6, 7], [9] * 20]
    params = [{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}] * 2
    alone, _ = tokens(str(folder), asked, dtype="float64")
    answer = generate(str(folder), asked, params, tp=tp, plugins=["mxfp4"])
    assert answer["tokens"] == [each[:8] for each in alone]


def test_unpacked_experts_are_quantized_if_asked_for(tmp_path, capsys):
    folder = str(write_tiny_kimi(tmp_path / "m", packed=False))
    asked = [[1, 2, 3, 4, 5]]
    with pytest.raises(ConfigError, match=r"nothing in .* is stored in MXFP4, and scope=stored"):
        tokens(folder, asked, ["mxfp4"])
    plain, _ = tokens(folder, asked, dtype="float64")
    found, counters = tokens(folder, asked, ["mxfp4"], ["mxfp4.scope=experts"], dtype="float64")
    assert len(found[0]) == len(plain[0]) == COUNT
    assert counters["layers_now"] == 5
    lines = [line for line in capsys.readouterr().err.splitlines() if "relative error" in line]
    assert len(lines) == 5
    assert all("experts: 24 matrices quantized from BF16" in line for line in lines)


def test_what_was_quantized_while_loading_is_what_quantize_writes(tmp_path):
    """Both give the same tokens, and without the plugin the folder runs dequantized."""
    from interlock.cli import main

    source = str(write_tiny_kimi(tmp_path / "m", packed=False))
    target = str(tmp_path / "q")
    asked = [[1, 2, 3, 4, 5], [7] * 33]
    assert main(["models", "quantize", source, target, "--scope", "all"]) == 0
    loaded, _ = tokens(source, asked, ["mxfp4"], ["mxfp4.scope=all"], dtype="float64")
    stored, counters = tokens(target, asked, ["mxfp4"], dtype="float64")
    dense, _ = tokens(target, asked, dtype="float64")
    assert loaded == stored == dense
    assert counters["layers_now"] > 5


def test_mxfp8_activations_are_rounded_on_any_device(prompts):
    found, counters = tokens(NANO, prompts[:2], ["mxfp4"], ["mxfp4.activations=mxfp8"])
    assert [len(each) for each in found] == [COUNT, COUNT]
    assert counters["calls_total"] > 0


def test_linear_layers_of_an_ordinary_model(tmp_path):
    folder = str(write_tiny_hf(tmp_path / "m", hidden_size=64, intermediate_size=96))
    asked = [[1, 2, 3, 4, 5], [7] * 33]
    found, counters = tokens(folder, asked, ["mxfp4"], ["mxfp4.scope=linear"], dtype="float32")
    assert len(found[0]) == COUNT
    assert counters["layers_now"] == counters["layers_cpu_now"] + counters.get(
        "layers_torch_now", 0
    )
    assert counters["packed_bytes_now"] > 0
    alone = [tokens(folder, [one], ["mxfp4"], ["mxfp4.scope=linear"], dtype="float32")[0][0]
             for one in asked]  # fmt: skip
    assert found == alone


def test_fingerprints_tell_quantized_caches_apart():
    def fingerprint(plugins, sets=()):
        flags = {"engine.model": NANO, "engine.max_model_len": 64}
        built = Engine(load_settings(plugins, flags=flags, sets=sets))
        built.close()
        return built.info.fingerprint

    plain = fingerprint([])
    found = [fingerprint(["mxfp4"]), fingerprint(["mxfp4"], ["mxfp4.activations=mxfp8"])]
    assert len({plain, *found}) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mxfp4.scope=attention", "mxfp4.scope: must be one of stored, experts, linear, all"),
        ("mxfp4.finalize=late", "mxfp4.finalize: must be one of deferred, eager"),
        ("mxfp4.tail=fused", "mxfp4.tail: fused needs GPUs that map each other's memory"),
        ("mxfp4.ignore=(", "'ignore': '(' is no regular expression"),
        ("mxfp4.scop=all", "did you mean mxfp4.scope?"),
    ],
)
def test_bad_settings_are_one_line(given, message):
    done = subprocess.run(
        [sys.executable, "-m", "interlock", "generate", "hi", "--plugins", "mxfp4", "--set", given],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_rank_that_would_cut_a_group_is_refused():
    """Attention outputs of heads of 16 at four ranks: the packed columns cannot be shared out."""
    from interlock_mxfp4.layers import Loss, packed_of

    cut = SimpleNamespace(
        info=SimpleNamespace(format="MXFP4", name="model.layers.0.self_attn.o_proj.weight"),
        packed=lambda: None,
    )
    with pytest.raises(WeightsError, match=r"o_proj.weight: this rank's part cuts a group of 32"):
        packed_of(cut, Loss("o_proj"))


def test_requests_that_fail_or_leave_do_not_touch_others(prompts, oracle):
    built = engine(NANO, {"mxfp4": Mxfp4()})
    for index, prompt in enumerate(prompts):
        built.add(Request(f"p{index}", list(prompt), greedy(COUNT)))
    for _ in range(3):
        built.step()
    built.abort("p2")
    found = drain(built, len(prompts))
    for index in (0, 1, 3, 4, 5):
        assert found[index] == oracle[index][-len(found[index]) :]


def test_the_server_reports_what_ran():
    from server.harness import serving

    with serving(NANO, real=True, plugins="mxfp4") as server:
        import httpx

        body = {"model": NANO, "prompt": "In the", "max_tokens": 4, "temperature": 0}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
        (line,) = [
            x for x in metrics.splitlines() if "finalize_deferred_total" in x and x[0] != "#"
        ]
        assert float(line.rpartition(" ")[2]) > 0
        assert json.loads(httpx.get(f"{server.url}/plugins", timeout=10).text)


@pytest.mark.parametrize("company", [["cache"], ["draft"], ["cache", "draft"]])
@pytest.mark.parametrize("first", [True, False])
def test_beside_plugins_that_cache_states_and_draft(prompts, oracle, company, first):
    """In either order, with memory that is short and prompts that repeat."""
    drafter = LookupDrafter(slots=0)
    drafter.propose = lambda requests: [right_then_wrong(r, prompts, oracle) for r in requests]
    others = {"cache": StateCache(), "draft": drafter}
    plugins = {name: others[name] for name in company}
    plugin = {"mxfp4": Mxfp4()}
    plugins = {**plugin, **plugins} if first else {**plugins, **plugin}
    built = engine(NANO, plugins, num_blocks=40, num_states=24)
    for _ in range(2):
        assert run(built, prompts, COUNT) == oracle
    counters = {report.name: report.counters for report in built.plugin_report()}
    for name in plugins:
        assert any(value for key, value in counters[name].items() if not key.endswith("_now")), name
    assert counters["mxfp4"]["finalize_deferred_total"] > 0


def right_then_wrong(request, prompts, oracle) -> list[int]:
    known = next(
        p + o for p, o in zip(prompts, oracle, strict=True) if p == request.prompt_token_ids
    )
    drafts = known[request.num_tokens : request.num_tokens + 3]
    return [*drafts[:2], *((token + 1) % 4096 for token in drafts[2:])]
