"""The same tokens from any number of ranks, greedy and sampled, and from two groups of torchrun."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys

import pytest

from interlock.errors import ConfigError
from parallel.ranks import PATIENCE_S, SCRIPT, arguments, environment, generate

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 15, 16, 17, 40, 70)]


@pytest.fixture(scope="module")
def alone(kimi, llama):
    return {m: generate(m, prompts(290), [GREEDY] * 6)["tokens"] for m in (kimi, llama)}


@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_tokens_of_the_hybrid_model(kimi, alone, tp):
    answer = generate(kimi, prompts(290), [GREEDY] * 6, tp=tp, max_num_batched_tokens=32)
    assert answer["tp"] == tp
    assert answer["tokens"] == alone[kimi]


@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_tokens_of_llama_with_shared_and_with_repeated_kv_heads(llama, alone, tp):
    assert generate(llama, prompts(290), [GREEDY] * 6, tp=tp)["tokens"] == alone[llama]


def test_sampled_tokens_are_chosen_once(kimi):
    """TPR-01: at a temperature, seeded or not, ranks cannot diverge, since one of them samples."""
    params = [
        {"temperature": 1.0, "max_tokens": 40, "seed": i, "ignore_eos": True} for i in range(5)
    ]
    params.append({"temperature": 1.0, "max_tokens": 40, "ignore_eos": True})
    one, two = (generate(kimi, prompts(290), params, tp=tp)["tokens"] for tp in (1, 2))
    assert one[:5] == two[:5]
    assert len(two[5]) == 40


def test_fingerprints_tell_geometries_apart_and_do_not_depend_on_pythons_hash_seed(kimi):
    """TPR-04: keys are equal in every process, whatever its PYTHONHASHSEED."""
    found = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, arguments(kimi, [[5]], [GREEDY], tp=2)],
            env=environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        found.add(json.loads(done.stdout.splitlines()[-1])["fingerprint"])
    assert len(found) == 1
    assert generate(kimi, [[5]], [GREEDY])["fingerprint"] not in found


def test_two_groups_of_torchrun(kimi, alone):
    """Two launchers, as on two machines: each starts one rank, and they meet on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    given = [
        "-m",
        "interlock",
        "generate",
        "--model",
        kimi,
        "--dtype",
        "float64",
        "--max-model-len",
        "256",
        "--num-blocks",
        "128",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "a stone",
    ]
    groups = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), *given],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    answers = [group.communicate(timeout=PATIENCE_S) for group in groups]
    assert [group.returncode for group in groups] == [0, 0], answers
    alone_too = subprocess.run(
        [sys.executable, *given],
        env=environment(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert answers[0][0] == alone_too.stdout
    assert answers[1][0] == b""


@pytest.mark.parametrize(("tp", "sizes"), [(3, "1, 2, 4"), (8, "1, 2, 4")])
def test_heads_that_cannot_be_shared_are_refused_with_the_sizes_that_can(kimi, tp, sizes):
    from interlock.weights.config import load_config
    from interlock.weights.resolve import resolve

    with pytest.raises(ConfigError, match=rf"engine\.tp: .*use one of {sizes}$"):
        load_config(resolve(kimi)).check_tp(tp)


def test_smollm2_says_that_its_nine_heads_go_with_one_three_or_nine_ranks(llama):
    from interlock.weights.config import ModelConfig

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    config.check_tp(3)
    with pytest.raises(ConfigError, match="use one of 1, 3, 9"):
        config.check_tp(2)
