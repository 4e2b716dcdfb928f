"""What the prefix cache buys and costs: `tox -e bench -- prefix_cache [--quick]`.

1. A system prompt that 16 users share, on SmolLM2-135M: against no plugin.
2. The same on k3-nano: states exported inside the pass, by a pass of their own, and no plugin.
3. Prompts of which none repeats, on both: what it costs where it cannot help.
4. A conversation with a growing history: time to the first token of every turn.
5. The index alone, up to a million blocks: microseconds per block to insert and to look up.
"""

from __future__ import annotations

import statistics
import time

from interlock.cli import main

CACHE = ["--plugins", "prefix_cache"]
NANO = ["--model", "k3-nano", "--set", "engine.num_states=96"]
SPLIT = ["--against", "prefix_cache.checkpoints=split"]
NONE = ["--against", "plugins=none"]


def commands(quick: bool) -> list[list[str]]:
    few = ["--repeats", "1" if quick else "3", "--no-floors"]
    users = ["--concurrency", "4", "--num-requests", "16", "--output-tokens", "16", *few]
    shared = ["--shared-prefix", "128" if quick else "2048"]
    shared += ["--prompt-tokens", "160" if quick else "2112", *users]
    nano = ["--shared-prefix", "128" if quick else "640"]
    nano += ["--prompt-tokens", "160" if quick else "704", *users]
    cold = ["--prompt-tokens", "64" if quick else "512", "--output-tokens", "32", *few]
    cold += ["--concurrency", "1,8"]
    return [
        ["bench", "run", *CACHE, *NONE, *shared],
        ["bench", "run", *CACHE, *NANO, *SPLIT, *NONE, *nano],
        ["bench", "run", *CACHE, *NONE, *cold],
        ["bench", "run", *CACHE, *NANO, *NONE, *cold],
    ]


def conversation(model: str, turns: int, tokens: int) -> None:
    """TTFT of every turn with and without the plugin, in turns, medians of three conversations."""
    from interlock.api import LLM
    from interlock.engine.request import SamplingParams

    options = {"max_model_len": 1024, "num_states": 64} if model == "k3-nano" else {}
    engines = {
        name: LLM(model, plugins=plugins, **options)
        for name, plugins in (("none", ()), ("prefix_cache", ("prefix_cache",)))
    }
    found: dict[str, list[list[float]]] = {name: [[] for _ in range(turns)] for name in engines}
    for repeat in range(3):
        histories: dict[str, list[int]] = {name: [] for name in engines}
        for turn in range(turns):
            for name, llm in engines.items():
                said = [(i * 37 + 11 * turn + 101 * repeat) % 400 + 300 for i in range(tokens)]
                prompt = histories[name] + said
                params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
                start, first, answer = time.perf_counter(), 0.0, []
                for output in llm.stream(prompt, params):
                    first = first or time.perf_counter() - start
                    answer += output.token_ids
                found[name][turn].append(first)
                histories[name] = prompt + answer
    print(f"\n# conversation on {model}: ms to the first token by turn, medians of 3")
    for name, per_turn in found.items():
        print(name, *(f"{1e3 * statistics.median(each):.0f}" for each in per_turn))
    for llm in engines.values():
        llm.engine.close()


def growth(sizes: tuple[int, ...]) -> None:
    from interlock.cache.blocks import BlockPool
    from interlock_prefix_cache.hashing import Chain, root
    from interlock_prefix_cache.index import Index

    print("\n# the index: microseconds per block of 16 tokens")
    print("blocks insert look-up evict")
    for size in sizes:
        pool = BlockPool(size)
        blocks, index = pool.allocate(size), Index(pool, BlockPool(0))
        chains = [list(range(i, i + 16 * 100)) for i in range(0, size * 2, 200)]
        start = time.perf_counter()
        for number, tokens in enumerate(chains):
            chain = Chain(root([("n", str(number))]), 16)
            for i in range(100):
                part = tokens[16 * i : 16 * i + 16]
                index.add_block(chain.name(i, tokens), part, blocks[number * 100 + i])
        inserted = time.perf_counter()
        for number, tokens in enumerate(chains):
            chain = Chain(root([("n", str(number))]), 16)
            for i in range(100):
                index.find(chain.name(i + 1, tokens))
        found = time.perf_counter()
        pool.drop(blocks)
        index.free_blocks(size // 10)
        ends = (inserted - start, found - inserted, (time.perf_counter() - found) * 10)
        print(size, *(f"{1e6 * seconds / size:.2f}" for seconds in ends))


def run(arguments: list[str]) -> int:
    quick, worst = "--quick" in arguments, 0
    for command in commands(quick):
        print(f"\n$ interlock {' '.join(command)}", flush=True)
        worst = max(worst, main(command))
    conversation("smollm2-135m", 2 if quick else 6, 32 if quick else 192)
    conversation("k3-nano", 2 if quick else 5, 32 if quick else 160)
    growth((1_000, 10_000) if quick else (10_000, 100_000, 1_000_000))
    return worst
