"""`tox -e bench`: interlock against transformers, or with a plugin's name, its benchmark."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from interlock.cli import main

HERE = Path(__file__).resolve().parent


def run(arguments: list[str]) -> int:
    script = HERE / arguments[0] / "bench.py" if arguments else HERE / "none"
    if script.is_file():
        return int(runpy.run_path(str(script))["run"](arguments[1:]))
    return main(["bench", "run", "--against", "transformers", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
