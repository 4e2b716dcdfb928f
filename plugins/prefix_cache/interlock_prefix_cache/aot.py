"""`python -m interlock_prefix_cache.aot [--check]`: the kernel compiled for B300 without a GPU.

Kimi K3 at TP8: 12 heads of 128 x 128. Prints registers, shared memory and spills; with ``--check``
more than `SPILLS` bytes of them, once per chunk, are an error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ARCH: Final = 103
BLOCKS: Final = (16, 32, 64)
"""Value channels per program; the launcher's default is 32."""
CHOSEN: Final = 32
SPILLS: Final = 16
HEADINGS: Final = ("value channels", "registers", "shared B", "spills B", "matrix instruction")


def compile_block(block: int, arch: int = ARCH) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from interlock_prefix_cache.kernels.prefill import CHUNK, MOST, WARPS, kda_prefill_kernel

    constants = {"K": 128, "V": 128, "BV": block, "CHUNK": CHUNK, "MOST": MOST}
    floats = dict.fromkeys(("q", "k", "v", "g", "beta", "states", "out"), "*fp32")
    numbers = dict.fromkeys(("starts", "slots", "positions", "targets"), "*i32")
    types = {**floats, **numbers, "H": "i32"}
    names = kda_prefill_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    source = ASTSource(
        fn=kda_prefill_kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    built = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": WARPS})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k.ptx")
        path.write_text(built.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}a", str(path)]
        done = subprocess.run(  # noqa: S603 - Triton's own assembler
            [*command, "-o", f"{path}.cubin"], capture_output=True, text=True, check=True
        )
    found = {
        name: int(match[1]) if (match := re.search(pattern, done.stderr)) else 0
        for name, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("spills", r"(\d+) bytes spill st"),
        )
    }
    mma = sorted(set(re.findall(r"(?:tcgen05\.mma|mma\.sync)[\w.:]*", built.asm["ptx"])))
    return {"block": block, **found, "shared": built.metadata.shared, "mma": " ".join(mma) or "-"}


def main(arguments: list[str]) -> int:
    entries = [compile_block(block) for block in BLOCKS]
    if "--json" in arguments:
        print(json.dumps(entries))
        return 0
    print("| " + " | ".join(HEADINGS) + " |\n" + "| --- " * len(HEADINGS) + "|")
    for e in entries:
        print(f"| {e['block']} | {e['registers']} | {e['shared']} | {e['spills']} | {e['mma']} |")
    spilled = [e for e in entries if e["block"] == CHOSEN and e["spills"] > SPILLS]
    for entry in spilled:
        print(f"aot: kda_prefill spills {entry['spills']} bytes", file=sys.stderr)
    return 1 if spilled and "--check" in arguments else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("aot: unset TRITON_INTERPRET: interpreted kernels are not compiled")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        sys.exit(main(sys.argv[1:]))
