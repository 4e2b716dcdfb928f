"""The whole hybrid model: against an independent module, in any batch, with drafts; its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelrun
from interlock.engine.batch import Batch, Row
from interlock.engine.request import Request, SamplingParams
from interlock.errors import WeightsError
from tinykimi import LINEAR_OFF, OFF, write_tiny_kimi, write_tiny_kimi_linear
from tolerances import close

TRAINING = Path(__file__).resolve().parents[2] / "training" / "k3_nano"
CPU = torch.device("cpu")
F64 = torch.float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_kimi(tmp_path_factory.mktemp("kimi") / "tiny-k3")


@pytest.fixture(scope="module")
def model(folder):
    return modelrun.load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    """k3-nano's training module, which shares no code with the engine."""
    sys.path.insert(0, str(TRAINING))
    try:
        from export import load_checkpoint

        return load_checkpoint(folder, F64)
    finally:
        sys.path.remove(str(TRAINING))


def prompt(length, seed=0):
    random = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, 290, (length,), generator=random).tolist()


@pytest.mark.parametrize("length", [1, 3, 16, 17, 50, 90])
@pytest.mark.parametrize("chunk", [None, 1, 7, 16])
def test_logits_are_those_of_an_independent_module(model, oracle, length, chunk):
    ids = prompt(length)
    with torch.no_grad():
        wanted = oracle.logits(torch.tensor([ids]))[0]
    close(modelrun.logits(model, ids, chunk), wanted, F64)


def test_taps_are_the_running_sums(model, oracle):
    ids = prompt(20)
    with torch.no_grad():
        wanted = torch.cat(oracle(torch.tensor([ids]), (0, 2, 5))[1], -1)[0]
    model.tap_layers = (0, 2, 5)
    modelrun.logits(model, ids)
    close(model.taps, wanted, F64)
    model.tap_layers = ()
    modelrun.logits(model, ids)
    assert model.taps is None


def request_of(index, ids, blocks=10):
    request = Request(str(index), ids, SamplingParams())
    request.block_table = list(range(index * blocks, (index + 1) * blocks))
    request.state_slot = index
    return request


def forward(model, rows):
    with torch.inference_mode():
        return model.logits(model.forward(Batch.build(rows, modelrun.BLOCK_SIZE, CPU)))


def poisoned(model):
    """Caches and slots full of NaN: whatever is read without having been written shows."""
    for layer in model.layers:
        for name in ("cache", "states", "windows"):
            cache = getattr(layer.attention, name, None)
            if cache is not None:
                cache.fill_(torch.nan)


def test_one_batch_of_all_kinds_is_its_rows_alone(folder):
    model = modelrun.load(folder)
    prompts = [prompt(n, seed=n) for n in (12, 9, 17, 30)]
    alone = [modelrun.logits(model, ids)[-1] for ids in prompts]
    model.allocate_caches(64, modelrun.BLOCK_SIZE, 6)
    poisoned(model)
    requests = [request_of(i, ids) for i, ids in enumerate(prompts)]
    model.clear_states([0, 1, 2, 3])
    # All but the last token of each, then one step that verifies, decodes and prefills.
    forward(model, [Row(r, 0, r.num_tokens - 3, [], 1, True) for r in requests])
    forward(model, [Row(requests[1], 6, 2, [], 1, True)])
    ids = requests[0].token_ids
    requests[0].token_ids = ids[:-2]
    rows = [
        Row(requests[0], 9, 3, ids[-2:], 3, False),
        Row(requests[1], 8, 1, [], 1, False),
        Row(requests[2], 14, 3, [], 1, True),
        Row(requests[3], 27, 3, [], 1, True),
    ]
    logits = forward(model, rows)
    for found, wanted in zip(logits[[2, 3, 4, 5]], alone, strict=True):
        close(found, wanted, F64)


@pytest.mark.parametrize("kept", range(5))
def test_after_a_verify_row_the_kept_tokens_count(folder, kept):
    """SPD-12: the state equals sequential decoding of the committed tokens, for none to all."""
    model = modelrun.load(folder)
    ids = prompt(24)
    wanted = modelrun.logits(model, ids)
    model.allocate_caches(64, modelrun.BLOCK_SIZE, 4)
    request = request_of(1, ids[:11])
    model.clear_states([1])
    forward(model, [Row(request, 0, 10, [], 1, True)])
    drafts = [*ids[11 : 10 + kept], *(3 for _ in range(5 - kept))][:4]
    forward(model, [Row(request, 10, 1 + len(drafts), drafts, 1, False)])
    model.settle_states([kept])
    request.token_ids = ids[: 10 + kept + 1]
    logits = forward(model, [Row(request, 10 + kept, 1, [], 1, False)])
    close(logits[0], wanted[10 + kept], F64)


def test_exported_states_continue_like_the_row_that_they_come_from(folder):
    model = modelrun.load(folder)
    ids = prompt(60)
    wanted = modelrun.logits(model, ids)
    model.allocate_caches(64, modelrun.BLOCK_SIZE, 4)
    request = request_of(1, ids, blocks=16)
    model.clear_states([1])
    row = Row(request, 0, 60, [], 1, True, exports=[(16, 2), (48, 3)])
    forward(model, [row])
    for position, slot in ((16, 2), (48, 3)):
        request.state_slot = slot
        logits = forward(model, [Row(request, position, 60 - position, [], 1, True)])
        close(logits[0], wanted[-1], F64)


def test_slots_are_copied_and_cleared_each_by_itself(folder):
    model = modelrun.load(folder)
    layer = model._recurrent()[0]
    layer.states[:] = torch.arange(4.0, dtype=F64).view(4, 1, 1, 1)
    model.copy_states([(0, 1), (1, 2)])
    assert layer.states[:, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]
    model.clear_states([3])
    assert layer.states[:, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 0.0]


SWITCHES = {
    "softplus gate": ({}, {"gate_lower_bound": None}),
    "low-rank gate": ({}, {"use_full_rank_gate": False}),
    "ordinary residual": ({"attn_res_block_size": None}, {}),
    "no latent": ({"routed_expert_hidden_size": None, "latent_moe_use_norm": None}, {}),
    "no latent norm": ({"latent_moe_use_norm": False}, {}),
    "SwiGLU": ({"hidden_act": "silu"}, {}),
    "one q_proj": ({"q_lora_rank": None}, {}),
    "no output gate": ({"mla_use_output_gate": False}, {}),
    "rotary": ({"mla_use_nope": False}, {}),
    "no shared experts": ({"num_shared_experts": 0}, {}),
    "grouped experts": ({"num_expert_group": 4, "topk_group": 2}, {}),
    "all of Kimi-Linear's": (OFF, LINEAR_OFF),
}


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_alone_changes_the_model_and_keeps_it_causal(tmp_path, model, switch):
    text, linear = SWITCHES[switch]
    other = modelrun.load(write_tiny_kimi(tmp_path / "m", linear=linear, **text))
    ids = prompt(40)
    logits = modelrun.logits(other, ids)
    close(modelrun.logits(other, ids, chunk=9), logits, F64)
    close(modelrun.logits(other, ids[:20]), logits[:20], F64)
    assert not torch.allclose(logits, modelrun.logits(model, ids))


def test_rotary_turns_with_the_position(tmp_path):
    """At position 0 nothing turns; from then on everything does."""
    plain = modelrun.load(write_tiny_kimi_linear(tmp_path / "a"))
    turned = modelrun.load(write_tiny_kimi_linear(tmp_path / "b", mla_use_nope=False))
    ids = prompt(30)
    first = modelrun.logits(plain, ids)[:1]
    close(modelrun.logits(turned, ids)[:1], first, F64)
    assert not torch.allclose(modelrun.logits(turned, ids)[5:], modelrun.logits(plain, ids)[5:])


# -- files -----------------------------------------------------------------------------------------


def changed(folder, tmp_path, change):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("language_model.model.norm.weight"), "1 of .* missing.*model.norm.weight"),
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), "missing.*experts.3.w1.weight_scale"),
        (
            lambda t: t.update({"language_model.model.layers.9.x": torch.zeros(1)}),
            "belong to no layer: language_model.model.layers.9.x",
        ),
        (
            lambda t: t.update({"language_model.lm_head.weight": torch.zeros(5, 64)}),
            r"lm_head.weight is \[5, 64\] instead of \[364, 64\]",
        ),
        (
            lambda t: t[f"{EXPERT}.weight_scale"].fill_(255),
            "experts.3.w1.weight_scale: a scale is NaN",
        ),
        (
            lambda t: t.update({"language_model.model.layers.0.self_attn.A_log": torch.zeros(3)}),
            r"A_log is \[3\] instead of \[4\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, tmp_path, change, message):
    with pytest.raises(WeightsError, match=message):
        modelrun.load(changed(folder, tmp_path, change))


def test_the_vision_part_is_left_out_with_one_line(folder, tmp_path, caplog):
    def add(tensors):
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
        tensors["mm_projector.post_norm.weight"] = torch.zeros(2)

    with caplog.at_level("INFO"):
        modelrun.load(changed(folder, tmp_path, add))
    assert "2 tensors of the vision part are left out" in caplog.text


def test_packed_and_plain_experts_are_the_same_model(tmp_path, folder, model):
    """Packed ones are found by their tensors, whatever quantization_config says or leaves out."""
    from interlock.weights.packed_fp4 import unpack

    def spell_out(tensors):
        for name in [n for n in tensors if n.endswith("weight_packed")]:
            base = name.removesuffix("_packed")
            scale = tensors.pop(f"{base}_scale")
            tensors[base] = unpack(tensors.pop(name), scale, torch.bfloat16)

    plain = modelrun.load(changed(folder, tmp_path, spell_out))
    ids = prompt(30)
    assert torch.equal(modelrun.logits(plain, ids), modelrun.logits(model, ids))
    assert plain.num_parameters == model.num_parameters
    assert plain.weight_bytes > model.weight_bytes
