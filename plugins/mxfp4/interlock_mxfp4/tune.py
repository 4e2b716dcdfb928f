"""`python -m interlock_mxfp4.tune OUT.json`: measure the kernels' tiles on the GPU at hand.

Every candidate of `interlock_mxfp4.tiles` is timed at Kimi K3's shapes; the best go to OUT.json,
which ``INTERLOCK_MXFP4_TILES=OUT.json`` puts in the place of the model's. The printed table has
each product's time, the time that its bytes alone would take at the bandwidth of a large copy on
the same card, and their ratio.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from interlock_mxfp4.aot import EXPERTS, INNER, LATENT, TOKENS, TOP
from interlock_mxfp4.kernels import activation, experts, experts_mx, routing
from interlock_mxfp4.kernels.reference import Packed
from interlock_mxfp4.tiles import Shape, Tiles, active_experts, candidates, choose, key, tune


def shapes(tokens: tuple[int, ...] = TOKENS) -> list[Shape]:
    return [
        Shape(kind, count, TOP, EXPERTS, *sizes)  # type: ignore[arg-type]
        for count in tokens
        for suffix in ("", "_mx")
        for kind, sizes in (
            (f"gate_up{suffix}", (INNER, LATENT)),
            (f"down{suffix}", (LATENT, INNER)),
        )
    ]


def problem(shape: Shape, device: str = "cuda") -> Callable[[Tiles], Tensor]:
    """The product of ``shape`` on random numbers, as a function of its tiles."""
    random = torch.Generator(device=device).manual_seed(0)

    def codes(rows: int, columns: int, high: int = 256, low: int = 0) -> Tensor:
        size = (shape.experts, rows, columns)
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=random)

    rows = shape.outputs * shape.matrices
    weights = Packed(codes(rows, shape.inputs // 2), codes(rows, shape.inputs // 32, 124, 118))
    scores = torch.rand(shape.tokens, shape.experts, device=device, generator=random)
    ids = scores.topk(shape.top).indices
    down = shape.kind.startswith("down")

    def run(tiles: Tiles) -> Tensor:
        route = routing.sort_tokens(ids, shape.experts, tiles.tokens)
        count = len(route.row_token) if down else shape.tokens
        x = torch.ones(count, shape.inputs, dtype=torch.bfloat16, device=device)
        if shape.block_scaled:
            given = activation.quantize_mxfp8(x)
            if down:
                return experts_mx.expert_down_mx(given, weights, route, tiles, x.dtype)
            return experts_mx.expert_gate_up_mx(given, weights, route, tiles, 4.0, 25.0)[1]
        if down:
            return experts.expert_down(x, weights, route, tiles)
        return experts.expert_gate_up(x, weights, route, tiles, 4.0, 25.0)

    return run


def timer(device: str = "cuda") -> Callable[[Shape, Tiles], float]:
    """Seconds of a product, sorting included, remembered per shape's problem."""
    from triton.testing import do_bench

    problems: dict[str, Callable[[Tiles], Tensor]] = {}

    def seconds(shape: Shape, tiles: Tiles) -> float:
        if key(shape) not in problems:
            problems.clear()
            problems[key(shape)] = problem(shape, device)
        run = problems[key(shape)]
        return float(do_bench(lambda: run(tiles), return_mode="median")) / 1e3

    return seconds


def floor_bytes(shape: Shape) -> float:
    """Bytes that must move: the active experts' weights, and each token's row in and out once."""
    matrix = shape.matrices * shape.outputs * shape.inputs * (0.5 + 1 / 32)
    rows = shape.tokens * shape.top
    return active_experts(shape) * matrix + rows * (shape.inputs + shape.outputs) * 2


def bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = float(do_bench(lambda: target.copy_(source), return_mode="median"))
    return 2 * source.nbytes / (milliseconds / 1e3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m interlock_mxfp4.tune", description=__doc__)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("interlock_mxfp4.tune: error: torch sees no CUDA device here", file=sys.stderr)
        return 1
    name, measure, rate = torch.cuda.get_device_name(), timer(), bandwidth()
    wanted = shapes(tuple(given.tokens))
    best = tune(wanted, measure, name, given.out)
    print(f"{name}: copies move {rate / 1e12:.2f} TB/s")
    print("| product | tiles | us | us of its bytes | ratio | us with the model's tiles |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in wanted:
        tiles = best[key(shape)]
        seconds, floor = measure(shape, tiles), floor_bytes(shape) / rate
        modelled = measure(shape, choose(shape))
        size = f"{tiles.tokens}x{tiles.outputs}x{tiles.inputs}"
        print(
            f"| {key(shape)} | {size} | {seconds * 1e6:.1f} | {floor * 1e6:.1f} | "
            f"{seconds / floor:.2f} | {modelled * 1e6:.1f} |"
        )
    print(f"{len(list(candidates(wanted[0])))} candidates each; written to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
