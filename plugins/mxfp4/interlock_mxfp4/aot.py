"""Compile the kernels ahead of time for a GPU that is not there, and say what they need.

`python -m interlock_mxfp4.aot` compiles every kernel at Kimi K3's TP8 shapes for B300 (sm_103a)
with the tiles that `interlock_mxfp4.tiles` chooses, and prints registers, shared memory, spills,
tensor memory and the matrix instruction. It shows that they are legal and what they take, not how
fast they are. ``--check`` fails on spills and on a block-scaled product without its instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from interlock_mxfp4.tiles import Device, Tiles, for_linear, pair

EXPERTS, TOP, LATENT, INNER, HIDDEN = 896, 16, 3584, 3072 // 8, 7168
TOKENS: Final = (1, 8, 16, 64, 128, 1024, 8192)
ARCH: Final = 103
MMA: Final = re.compile(r"(tcgen05\.mma[\w.:]*|wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*)")
_POINTERS: Final = {"bf16": "*bf16", "u8": "*u8", "i32": "*i32", "i64": "*i64", "f32": "*fp32"}


@attrs.frozen
class Case:
    """One kernel as it is compiled: argument types, constants and options."""

    kernel: str
    tokens: tuple[int, ...]
    """Batch sizes that this is chosen for."""
    types: dict[str, str] = attrs.field(hash=False)
    constants: dict[str, Any] = attrs.field(hash=False)
    tiles: Tiles
    block_scaled: bool = False
    options: dict[str, Any] = attrs.field(factory=dict, hash=False)


@attrs.frozen
class Entry:
    """What the compiler made of a case."""

    kernel: str
    tokens: tuple[int, ...]
    tile: str
    warps: int
    registers: int
    shared: int
    tensor_memory: int
    spill_stores: int
    spill_loads: int
    instruction: str
    block_scaled: bool

    def problems(self) -> Iterator[str]:
        where = f"{self.kernel} {self.tile} (M = {', '.join(map(str, self.tokens))})"
        if self.spill_stores or self.spill_loads:
            yield f"{where}: spills {self.spill_stores} bytes, and loads {self.spill_loads}"
        if self.shared > Device().shared_bytes:
            yield f"{where}: {self.shared} bytes of shared memory do not fit"
        if self.block_scaled and "block_scale" not in self.instruction:
            yield f"{where}: no block-scaled instruction, but {self.instruction or 'none'}"


def _expert_types(mx: bool) -> dict[str, str]:
    value = "*u8" if mx else "*bf16"
    sizes = dict.fromkeys(("D", "F"), "i32d16") | {"E": "i32", "stride_x": "i32d16"}
    pointers = {"x": value, "inner": value, "codes": "*u8", "scales": "*u8", "starts": "*i32"}
    extra = {"row_token": "*i32", "xs": "*u8", "inners": "*u8", "outs": "*u8"}
    return {**sizes, **pointers, **extra, "beta": "fp32", "linear_beta": "fp32"}


def cases() -> list[Case]:
    """Every kernel at K3's TP8 shapes; batch sizes with the same tiles share a case."""
    chosen: dict[tuple[str, Tiles], list[int]] = {}
    for tokens in TOKENS:
        for mx in (False, True):
            suffix = "_mx" if mx else ""
            tiles = pair(TOP, tokens, EXPERTS, LATENT, INNER, mx)
            for name, each in zip(("gate_up", "down"), tiles, strict=True):
                chosen.setdefault((f"{name}{suffix}_kernel", each), []).append(tokens)
        chosen.setdefault(("linear_add_kernel", for_linear(tokens, HIDDEN, LATENT)), []).append(
            tokens
        )
    products = [_product(name, tiles, tuple(each)) for (name, tiles), each in chosen.items()]
    return [*products, *_others()]


def _product(name: str, tiles: Tiles, tokens: tuple[int, ...]) -> Case:
    blocks = {"BT": tiles.tokens, "BN": tiles.outputs, "BK": tiles.inputs}
    if name == "linear_add_kernel":
        types = {"x": "*bf16", "weight": "*bf16", "addend": "*bf16", "out": "*bf16", "T": "i32"}
        types |= dict.fromkeys(("D", "H", "stride_x"), "i32d16")
        return Case(name, tokens, types, blocks, tiles)
    mx = name.endswith("_mx_kernel")
    constants = {**blocks, "BINS": 1024}
    gate = name.startswith("gate_up")
    if gate:
        constants |= {"SITU": True, "BOUNDED": True}
    types = {**_expert_types(mx), "out": "*u8" if mx and gate else "*bf16"}
    return Case(name, tokens, types, constants, tiles, block_scaled=mx)


def _others() -> list[Case]:
    everywhere, none = TOKENS, Tiles(1, 1, 1)
    sort = {"ids": "*i64", "counts": "*i32", "starts": "*i32", "row_token": "*i32"}
    sort |= {"row_map": "*i32", "pairs": "i32", "E": "i32", "chunks": "i32", "top": "i32"}
    few, many = (1, 8, 16, 64, 128), (1024, 8192)
    found = [
        Case("_offsets", everywhere, sort, {"BLOCK": 16, "BINS": 1024}, none),
    ]
    wide = Tiles(1, 1, 1, warps=8)
    for steps, tokens in ((1, few), (32, many)):
        chunk = {"CHUNK": 64 * steps, "BINS": 1024}
        found.append(Case("_count", tokens, sort, chunk, none))
        found.append(Case("_place", tokens, sort, {**chunk, "STEP": 64}, wide))
    tail = {"rows": "*bf16", "weights": "*fp32", "row_map": "*i32", "norm": "*bf16"}
    tail |= {"D": "i32d16", "eps": "fp32"}
    exact = {"enable_fp_fusion": False}
    return [
        *found,
        Case(
            "finalize_kernel", everywhere, {**tail, "out": "*fp32"}, {"TOP": TOP, "BD": 1024},
            none, options=exact,
        ),
        Case(
            "finalize_norm_kernel", everywhere, {**tail, "out": "*bf16"},
            {"TOP": TOP, "BD": 4096}, Tiles(1, 1, 1, warps=8), options=exact,
        ),
        Case(
            "reduce_tail_kernel", few,
            {**tail, "out": "*bf16", "buffers": "*i64", "signals": "*i64", "rank": "i32",
             "call": "i32"},
            {"WORLD": 8, "TOP": TOP, "BD": 4096, "SLOTS": 128, "PART": 0},
            Tiles(1, 1, 1, warps=8), options=exact,
        ),
        Case(
            "quantize_kernel", everywhere,
            {"x": "*bf16", "out": "*u8", "scales": "*u8", "M": "i32", "K": "i32d16",
             "stride_x": "i32d16"},
            {"BM": 8, "BK": 512}, none,
        ),
    ]  # fmt: skip


def compile_case(case: Case, arch: int = ARCH) -> Entry:
    """Compile one case. `TRITON_INTERPRET` must not have been set when Triton was imported."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    kernel = _kernels()[case.kernel]
    signature, attributes = _signature(kernel.arg_names, case)
    source = ASTSource(fn=kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.tiles.warps, "num_stages": case.tiles.stages, **case.options}
    built = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stores, loads = _resources(built.asm["ptx"], arch)
    return Entry(
        kernel=case.kernel.strip("_").removesuffix("_kernel"),
        tokens=case.tokens,
        tile="x".join(str(v) for v in case.constants.values() if v is not True),
        warps=built.metadata.num_warps,
        registers=registers,
        shared=built.metadata.shared,
        tensor_memory=getattr(built.metadata, "tmem_size", 0) or 0,
        spill_stores=stores,
        spill_loads=loads,
        instruction=" ".join(sorted(set(MMA.findall(built.asm["ptx"])))),
        block_scaled=case.block_scaled,
    )


def _kernels() -> dict[str, Any]:
    from interlock_mxfp4.kernels import (
        activation,
        experts,
        experts_mx,
        reduce_tail,
        routing,
        tail,
    )

    modules = (activation, experts, experts_mx, reduce_tail, routing, tail)
    return {name: item for module in modules for name, item in vars(module).items()}


def _signature(names: Iterable[str], case: Case) -> tuple[dict[str, str], dict[Any, Any]]:
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind = "constexpr" if name in case.constants else case.types[name]
        if kind == "i32d16" or kind.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind.removesuffix("d16")
    return signature, attributes


def _resources(ptx: str, arch: int) -> tuple[int, int, int]:
    """Registers, and bytes of spill stores and loads, from the assembler's own report."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k.ptx")
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}a", str(path)]
        done = subprocess.run(  # noqa: S603 - Triton's own assembler
            [*command, "-o", f"{path}.cubin"], capture_output=True, text=True, check=True
        )
    return tuple(  # type: ignore[return-value]
        int(found[1]) if (found := re.search(pattern, done.stderr)) else 0
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill st", r"(\d+) bytes spill lo")
    )


def compile_all(names: Iterable[str] | None = None, arch: int = ARCH) -> list[Entry]:
    wanted = None if names is None else set(names)
    return [compile_case(case, arch) for case in cases() if wanted is None or case.kernel in wanted]


HEADINGS: Final = (
    "kernel", "M", "tile", "warps", "registers", "shared B", "tensor memory", "spills B",
    "matrix instruction",
)  # fmt: skip


def row(entry: Entry) -> list[str]:
    spills = f"{entry.spill_stores}/{entry.spill_loads}"
    numbers = (entry.warps, entry.registers, entry.shared, entry.tensor_memory, spills)
    tokens = ", ".join(map(str, entry.tokens))
    return [entry.kernel, tokens, entry.tile, *map(str, numbers), entry.instruction or "-"]


def markdown(entries: Iterable[Entry]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(row, entries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m interlock_mxfp4.aot", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is wrong")
    parser.add_argument("--json", type=Path, help="write the table there")
    parser.add_argument("--kernel", action="append", help="only these; may be repeated")
    parser.add_argument("--arch", type=int, default=ARCH, help="compute capability, such as 103")
    given = parser.parse_args(arguments)
    entries = compile_all(given.kernel, given.arch)
    print(markdown(entries), end="")
    if given.json:
        import triton

        table = {"triton": triton.__version__, "arch": f"sm_{given.arch}a"}
        rows = [attrs.asdict(entry) for entry in entries]
        given.json.write_text(json.dumps({**table, "kernels": rows}, indent=1) + "\n")
    problems = [problem for entry in entries for problem in entry.problems()]
    for problem in problems:
        print(f"aot: {problem}", file=sys.stderr)
    return 1 if problems and given.check else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("aot: unset TRITON_INTERPRET: interpreted kernels are not compiled")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        sys.exit(main())
