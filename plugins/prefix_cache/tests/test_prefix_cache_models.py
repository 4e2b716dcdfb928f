"""The cache on real models, beside the other plugins that come with interlock, and served."""

from __future__ import annotations

import itertools

import httpx
import pytest
import torch

from interlock.engine.engine import Engine
from interlock.settings import load_settings
from k3nano.play import run
from plugins_for_tests import LookupDrafter
from server.harness import serving
from tinymodels import write_tiny_hf

NANO = "k3-nano"
COUNT = 16


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A shared beginning of 100 tokens under other ends, repeats, and strangers."""
    random = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(256, 4096, (count,), generator=random).tolist()

    common = draw(100)
    ends = [[*common, *draw(n)] for n in (1, 12, 28, 60)]
    return [*ends, draw(33), draw(48), draw(49), ends[1]]


def engine(model: str, plugins=(), sets=(), **settings) -> Engine:
    flags = {"engine.model": model, "engine.dtype": "float64", "engine.max_model_len": 512,
             "engine.num_blocks": 300, "engine.threads": 1}  # fmt: skip
    flags |= {f"engine.{name}": value for name, value in settings.items()}
    return Engine(load_settings(list(plugins), flags=flags, sets=list(sets)))


@pytest.fixture(scope="module")
def oracle(prompts):
    built = engine(NANO, max_num_seqs=1)
    return [run(built, [prompt], COUNT)[0] for prompt in prompts]


BOTH = ("mxfp4", "prefix_cache")
SUBSETS = [p for size in range(3) for p in itertools.permutations(BOTH, size)]


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "bare")
@pytest.mark.parametrize("small", [False, True])
def test_every_subset_of_the_plugins_gives_the_oracle_s_tokens(prompts, oracle, names, small):
    size = {"num_blocks": 40, "num_states": 10} if small else {"num_states": 80}
    built = engine(NANO, names, max_num_batched_tokens=64, **size)
    for _ in range(2):
        assert run(built, prompts, COUNT) == oracle
    counters = {report.name: report.counters for report in built.plugin_report()}
    if "prefix_cache" in names:
        assert counters["prefix_cache"]["hit_tokens_total"] > 100
        assert counters["prefix_cache"]["exported_states_total"] > 3
    if "mxfp4" in names:
        assert counters["mxfp4"]["finalize_deferred_total"] > 0


@pytest.mark.parametrize("mode", ["internal", "split", "off"])
def test_every_way_of_keeping_states(prompts, oracle, mode):
    built = engine(NANO, ["prefix_cache"], [f"prefix_cache.checkpoints={mode}"], num_states=80)
    for prompt, wanted in zip(prompts * 2, oracle * 2, strict=True):
        assert run(built, [prompt], COUNT)[0] == wanted
    (report,) = built.plugin_report()
    # Without checkpoints only what continues a whole former request could hit.
    assert (report.counters["hit_tokens_total"] > 0) == (mode != "off")


@pytest.mark.parametrize("tp", [2])
def test_ranks_share_one_cache_of_names(prompts, oracle, tp):
    from parallel.ranks import generate

    params = [{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}] * len(prompts)
    answer = generate(NANO, prompts, params, tp=tp, plugins=["prefix_cache"], num_states=60,
                      max_num_seqs=2)  # fmt: skip
    assert answer["tokens"] == oracle


def test_a_plain_model(tmp_path):
    folder = str(write_tiny_hf(tmp_path / "m"))
    prompts = [[5, 6, 7] * 20, [5, 6, 7] * 20 + [9], [1, 2] * 16]
    bare = engine(folder, max_num_seqs=1)
    wanted = [run(bare, [prompt], COUNT)[0] for prompt in prompts]
    built = engine(folder, ["prefix_cache"])
    for _ in range(2):
        assert run(built, prompts, COUNT) == wanted
    (report,) = built.plugin_report()
    assert report.counters["hit_tokens_total"] >= 59 + 60 + 31


def test_prompt_logprobs_are_complete_and_the_same_whatever_is_cached():
    """PFX-09 and PFX-10: A x, B, A y in any order; what is asked for is computed."""
    from interlock.engine.request import Request, SamplingParams

    base = [300 + i for i in range(33)]
    prompts = [[*base, 7], [400] * 33, [*base, 9]]

    def logprobs(built, prompt):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        built.add(Request(f"r{id(prompt)}{built.stats().steps_total}", list(prompt), params))
        outputs = []
        while built.has_work():
            outputs += built.step()
        return [None if each is None else each.logprob for each in outputs[-1].prompt_logprobs]

    bare = engine(NANO)
    wanted = [logprobs(bare, prompt) for prompt in prompts]
    for order in itertools.permutations(range(3)):
        built = engine(NANO, ["prefix_cache"])
        for index in (*order, *order):
            assert logprobs(built, prompts[index]) == pytest.approx(wanted[index], abs=1e-9)
            assert len(wanted[index]) == len(prompts[index])


def test_served_with_salts_and_cached_token_counts():
    with serving(NANO, real=True, plugins="prefix_cache") as server:
        prompt = [300 + i for i in range(40)]

        def cached(**fields) -> int:
            body = {"model": NANO, "prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(), cached()] == [0, 32]
        assert [cached(cache_salt=salt) for salt in "aba"] == [0, 0, 32]
        assert cached(plugins={"prefix_cache": {"enabled": False}}) == 0
        bad = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": NANO, "prompt": prompt, "plugins": {"prefix_cache": {"enabled": "no"}}},
            timeout=60,
        )
        assert bad.status_code == 400
        assert "plugins.prefix_cache takes" in bad.text
        metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
        assert 'plugin="prefix_cache"' in metrics
        assert "Traceback" not in server.log


def test_keys_can_be_kept_apart():
    """`server.salt_by_key`: what one key's requests have cached is no other's hit."""
    settings = {"server__api_key": "one,two", "server__salt_by_key": True}
    with serving(NANO, real=True, plugins="prefix_cache", **settings) as server:

        def cached(key: str, **fields) -> int:
            body = {"model": NANO, "prompt": list(range(300, 340)), "max_tokens": 2, **fields}
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, timeout=60,
                headers={"authorization": f"Bearer {key}"},
            )  # fmt: skip
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(key) for key in ("one", "two", "one", "two")] == [0, 0, 32, 32]
        assert cached("one", cache_salt="s") == 0
        assert cached("two", cache_salt="s") == 0
        assert cached("one", cache_salt="s") == 32


def test_beside_a_drafter_that_is_partly_right(prompts, oracle):
    from interlock.plugins import Plugins
    from interlock.settings import EngineSettings, Settings
    from interlock_prefix_cache import PrefixCache

    def drafts(request):
        known = next(
            p + o for p, o in zip(prompts, oracle, strict=True) if p == request.prompt_token_ids
        )
        right = known[request.num_tokens : request.num_tokens + 3]
        return [*right[:2], *((token + 1) % 4096 for token in right[2:])]

    drafter = LookupDrafter(slots=0)
    drafter.propose = lambda requests: [drafts(request) for request in requests]
    settings = EngineSettings(
        model=NANO, dtype="float64", max_model_len=512, num_blocks=60, num_states=14, threads=1
    )
    plugins = Plugins.of({"prefix_cache": PrefixCache(), "draft": drafter})
    built = Engine(Settings(engine=settings), plugins=plugins)
    for _ in range(3):
        assert run(built, prompts, COUNT) == oracle
    assert built.stats().accepted_tokens_total > 0
