"""Runs prompts on an engine with several ranks, in a process of its own, and reads its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
PATIENCE_S = 90

SCRIPT = """
import json, sys
from interlock.api import LLM
from interlock.engine.request import SamplingParams

def main():
    given = json.loads(sys.argv[1])
    llm = LLM(given["model"], **given["engine"])
    prompts = given["prompts"]
    params = [SamplingParams(**p) for p in given["params"]]
    answers = llm.generate(prompts, params)
    info = llm.engine.info
    print(json.dumps({"tokens": [a.token_ids for a in answers], "tp": info.tp,
                      "fingerprint": info.fingerprint}))
    llm.engine.close()

main()
"""


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent / "core"), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def arguments(model: str, prompts: list[Any], params: list[dict[str, Any]], **engine: Any) -> str:
    options = {"dtype": "float64", "max_model_len": 256, "num_blocks": 128, **engine}
    return json.dumps({"model": model, "prompts": prompts, "params": params, "engine": options})


def generate(model: str, prompts: list[Any], params: list[dict[str, Any]], **engine: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments(model, prompts, params, **engine)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
