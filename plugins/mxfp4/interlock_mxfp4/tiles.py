"""Tile sizes, from a small model of what a launch costs; measured ones replace it.

A product's time is taken as the larger of two, plus what its waves of tiles cost to begin:

* bytes: weights once per tile of tokens of every active expert, activations once per tile of
  outputs, results once, over the memory's bandwidth;
* arithmetic: whole tiles, padding included, over the matrix units' rate.

How many experts are active follows from drawing each token's experts at random: of E experts
E (1 - (1 - top / E)^T) are (the router balances them; a real batch has rather fewer). `tune`
measures the candidates on the device instead, and writes what it finds where `measured` reads it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import attrs

Kind = Literal["gate_up", "down", "gate_up_mx", "down_mx"]
"""The products; ``_mx`` take MXFP8 activations."""
TABLE_VARIABLE: Final = "INTERLOCK_MXFP4_TILES"


@attrs.frozen
class Tiles:
    """Sizes of one program's tile and how it is compiled."""

    tokens: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3


@attrs.frozen
class Device:
    """Rates of a GPU, from its data sheet; B300 unless said otherwise."""

    multiprocessors: int = 148
    bytes_per_s: float = 8e12
    flops_per_s: float = 2.5e15
    """bf16, dense."""
    block_scaled_flops_per_s: float = 5e15
    """MXFP8 by MXFP4, dense."""
    shared_bytes: int = 232_448
    """Of one block."""
    tile_s: float = 2e-6
    """Beginning and draining a wave of tiles: a guess, where the others are a data sheet's."""


@attrs.frozen
class Shape:
    """One product over all experts: ``outputs`` are gate's alone, since up's come with them."""

    kind: Kind
    tokens: int
    top: int
    experts: int
    outputs: int
    inputs: int

    @property
    def matrices(self) -> int:
        return 2 if self.kind.startswith("gate_up") else 1

    @property
    def block_scaled(self) -> bool:
        return self.kind.endswith("_mx")


TOKENS: Final = (16, 32, 64, 128)
"""Tiles of tokens: the matrix instruction's N, which begins at 16 for what Triton emits."""
OUTPUTS: Final = (64, 128)
INPUTS: Final = (64, 128, 256)


def candidates(shape: Shape) -> Iterator[Tiles]:
    """Tiles that compile without spills for B300 (`interlock_mxfp4.aot` checks those chosen)."""
    for tokens, outputs, inputs in itertools.product(TOKENS, OUTPUTS, INPUTS):
        tiles = Tiles(tokens, outputs, inputs, *_compiled(shape, tokens, outputs, inputs))
        if shared_bytes(shape, tiles) <= Device().shared_bytes and _fits(shape, tiles):
            yield tiles


def _compiled(shape: Shape, tokens: int, outputs: int, inputs: int) -> tuple[int, int]:
    """Warps and stages: more warps where a thread's registers would not hold its part."""
    wide = outputs * tokens * shape.matrices > 64 * 64
    # Weights that are unpacked in registers: with four warps more than 64 inputs may spill.
    unpacked = not shape.block_scaled and inputs > 64
    return (8 if wide or unpacked else 4), 3


def _fits(shape: Shape, tiles: Tiles) -> bool:
    if shape.block_scaled:
        # The instruction takes 128 rows of weights; a half-filled one would be unpacked instead.
        return tiles.outputs == 128 and tiles.inputs >= 128
    return tiles.outputs * tiles.inputs <= 128 * 128


def shared_bytes(shape: Shape, tiles: Tiles) -> int:
    """What the operands of the stages in flight take."""
    activations = 1 if shape.block_scaled else 2
    weights = tiles.outputs * tiles.inputs * (0.5 + 1 / 32) * shape.matrices
    if not shape.block_scaled:
        # Unpacked weights go through shared memory once more, unstaged.
        weights += tiles.outputs * tiles.inputs * 2 / tiles.stages
    tokens = tiles.tokens * tiles.inputs * activations
    return math.ceil((weights + tokens) * tiles.stages)


def active_experts(shape: Shape) -> float:
    missing = (1 - shape.top / shape.experts) ** shape.tokens
    return shape.experts * (1 - missing)


def seconds(shape: Shape, tiles: Tiles, device: Device = Device()) -> float:
    """The model's time of one product; see the module's text."""
    active = max(1.0, active_experts(shape))
    per_expert = max(1.0, shape.tokens * shape.top / active)
    # A tile more for the expert whose tokens are just over a multiple, on average half of one.
    row_tiles = active * max(1.0, per_expert / tiles.tokens + 0.5 * (per_expert > tiles.tokens))
    column_tiles = math.ceil(shape.outputs / tiles.outputs)
    rows = row_tiles * tiles.tokens
    weight_bytes = shape.matrices * shape.outputs * shape.inputs * (0.5 + 1 / 32)
    element = 1 + 1 / 32 if shape.block_scaled else 2.0
    # Tokens come from the second-level cache after their first tile of outputs.
    moved = row_tiles * weight_bytes + rows * shape.inputs * element * (1 + column_tiles / 8)
    moved += rows * shape.outputs * 2
    flops = 2.0 * shape.matrices * rows * column_tiles * tiles.outputs * shape.inputs
    rate = device.block_scaled_flops_per_s if shape.block_scaled else device.flops_per_s
    # The matrix unit is fed 128 rows of weights at a time; 64 leave half of it idle.
    rate *= min(1.0, tiles.outputs / 128) * min(1.0, tiles.tokens / 64)
    waves = math.ceil(row_tiles * column_tiles / (device.multiprocessors * _resident(shape, tiles)))
    steps = math.ceil(shape.inputs / tiles.inputs)
    begin = waves * device.tile_s * (1 + steps / 64)
    return max(moved / device.bytes_per_s, flops / rate) + begin


def _resident(shape: Shape, tiles: Tiles) -> int:
    """Programs that share a multiprocessor: by shared memory, at most four."""
    return max(1, min(4, Device().shared_bytes // max(1, shared_bytes(shape, tiles))))


@functools.lru_cache(maxsize=4096)
def choose(shape: Shape) -> Tiles:
    """The measured best tiles for ``shape`` if there are any, else the model's."""
    found = measured().get(key(shape))
    if found is not None:
        return found
    return min(candidates(shape), key=lambda tiles: seconds(shape, tiles))


def pair(
    top: int, tokens: int, experts: int, size: int, inner: int, mxfp8: bool
) -> tuple[Tiles, Tiles]:
    """Tiles of both products of a batch; they share the tile of tokens, as rows are sorted once."""
    tokens = bucket(tokens)
    suffix = "_mx" if mxfp8 else ""
    shapes = [
        Shape(f"gate_up{suffix}", tokens, top, experts, inner, size),  # type: ignore[arg-type]
        Shape(f"down{suffix}", tokens, top, experts, size, inner),  # type: ignore[arg-type]
    ]
    table = measured()
    if all(key(shape) in table for shape in shapes):
        first, second = (table[key(shape)] for shape in shapes)
        if first.tokens == second.tokens:
            return first, second
    return _modelled_pair(*shapes)


@functools.lru_cache(maxsize=4096)
def _modelled_pair(gate_up: Shape, down: Shape) -> tuple[Tiles, Tiles]:
    both = [
        (first, second)
        for first, second in itertools.product(candidates(gate_up), candidates(down))
        if first.tokens == second.tokens
    ]
    return min(both, key=lambda tiles: seconds(gate_up, tiles[0]) + seconds(down, tiles[1]))


def bucket(tokens: int) -> int:
    """Numbers of tokens up to the same power of two have the same tiles, compiled once."""
    return 1 << max(0, tokens - 1).bit_length()


@functools.lru_cache(maxsize=1024)
def for_linear(tokens: int, outputs: int, inputs: int) -> Tiles:
    """Tiles of a dense bf16 product (the up-projection): narrow for a few tokens."""
    del outputs
    width = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    if width == 128:
        return Tiles(width, 128, 64, 8, 3)
    return Tiles(width, 128, 64 if inputs % 128 else 128, 4, 3)


def key(shape: Shape) -> str:
    parts = (shape.kind, shape.tokens, shape.top, shape.experts, shape.outputs, shape.inputs)
    return " ".join(map(str, parts))


@functools.cache
def measured() -> dict[str, Tiles]:
    """The table in the file that ``INTERLOCK_MXFP4_TILES`` names, if any."""
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return {}
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))["tiles"]
        return {name: Tiles(**tiles) for name, tiles in table.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{TABLE_VARIABLE}={path}: no table of tiles: {error}") from None


def tune(
    shapes: list[Shape], run: Callable[[Shape, Tiles], float], device: str, path: Path
) -> dict[str, Tiles]:
    """Time every candidate with ``run`` (seconds) and write the best of each shape to ``path``."""
    best = {key(shape): min(candidates(shape), key=lambda t: run(shape, t)) for shape in shapes}
    table = {name: attrs.asdict(tiles) for name, tiles in best.items()}
    path.write_text(json.dumps({"device": device, "tiles": table}, indent=1), encoding="utf-8")
    return best
