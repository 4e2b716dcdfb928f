"""What MXFP4 buys and costs: `tox -e bench -- mxfp4 [--quick]`.

Three measurements, each of configurations in turns within one run:

1. SmolLM2-135M with its linear layers in MXFP4 against bfloat16: memory, time, throughput. Both
   use one kernel for all rows (`engine.batch_invariant`), as the bare core would otherwise read
   this file's own 4-bit blocks.
2. The same two on held-out text: perplexity.
3. k3-nano, whose experts are stored in MXFP4: deferred against eager finalization, and against
   the bare core, which dequantizes them.
"""

from __future__ import annotations

from interlock.cli import main

LINEAR = ["--plugins", "mxfp4", "--set", "mxfp4.scope=linear"]
BF16 = ["--set", "engine.batch_invariant=true", "--against", "plugins=none"]
NANO = ["--model", "k3-nano", "--plugins", "mxfp4"]
OTHERS = ["--against", "mxfp4.finalize=eager", "--against", "plugins=none"]


def commands(quick: bool) -> list[list[str]]:
    repeats = ["--repeats", "1" if quick else "5", "--no-floors"]
    size = ["--prompt-tokens", "64" if quick else "256", "--output-tokens", "8" if quick else "64"]
    load = ["--concurrency", "1,8", *size, *repeats]
    windows = ["--windows", "2" if quick else "24"]
    return [
        ["bench", "run", *LINEAR, *BF16, *load],
        ["bench", "perplexity", *LINEAR, *BF16, *windows],
        ["bench", "run", *NANO, *OTHERS, *load],
    ]


def run(arguments: list[str]) -> int:
    worst = 0
    for command in commands("--quick" in arguments):
        print(f"\n$ interlock {' '.join(command)}", flush=True)
        worst = max(worst, main(command))
    return worst
