from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from interlock import ops
from interlock.errors import PluginError
from interlock.ops import reference, torch_ops
from opcases import CPU, batch, caches, random


def test_choices_say_what_runs_and_why(dtype):
    choices = ops.build(CPU, dtype, {}).choices
    assert set(choices) == set(ops.OPS)
    hybrid = {"causal_conv", "gated_norm", "residual_mix", "latent_store", "mla_attention"}
    hybrid |= {"situ_mul", "route", "run_experts", "kda_gate", "kda_recurrent", "kda_chunk"}
    hybrid |= {"finalize_experts", "latent_tail", "linear_add"}
    for name, text in choices.items():
        assert text.startswith("torch: no other" if name in hybrid else "numba on "), name
    assert ops.build(CPU, torch.float64, {}).choices["attention"] == "torch: no kernels for float64"
    meta = ops.build(torch.device("meta"), dtype, {})
    assert meta.choices["rms_norm"] == "torch: the device is meta"


def test_overrides_replace_single_ops(dtype):
    table = ops.build(CPU, dtype, {("silu_mul", "cpu"): reference.silu_mul})
    assert table.silu_mul is reference.silu_mul
    assert table.choices["silu_mul"] == "plugin (interlock.ops.reference)"
    assert table.choices["attention"].startswith("numba")
    other = ops.build(CPU, dtype, {("silu_mul", "cuda"): reference.silu_mul})
    assert other.silu_mul is not reference.silu_mul


def test_an_override_of_an_unknown_op_is_refused():
    with pytest.raises(PluginError, match=r"'atention'; ops are rms_norm, .*attention"):
        ops.build(CPU, torch.float32, {("atention", "cpu"): print})


def test_without_numba_everything_is_torch(monkeypatch):
    for name in [m for m in sys.modules if m.startswith("interlock.ops.cpu_ops")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("interlock.ops.cpu_ops", raising=False)
    monkeypatch.setitem(sys.modules, "interlock.ops.cpu_ops", None)
    table = ops.build(CPU, torch.float32, {})
    assert table.attention is torch_ops.attention
    assert table.choices["attention"].startswith("torch: numba can't be used (")
    b = batch((), [(1, 20)], [(3, 9)])
    k, v = caches(b, 16, 2, 32, torch.float32)
    q = random(4, 4, 32)
    table.prepare(4, 2, 32)
    torch.testing.assert_close(
        table.attention(q, k, v, b, 0.2), reference.attention(q, k, v, b, 0.2)
    )


def test_importing_compiles_nothing_and_sets_nothing():
    code = (
        "import os; before = dict(os.environ)\n"
        "import sys, interlock.ops, interlock.layers.linear\n"
        "assert 'numba' not in sys.modules\n"
        "assert dict(os.environ) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
