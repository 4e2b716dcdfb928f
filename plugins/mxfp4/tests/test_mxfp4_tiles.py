"""The model that chooses tiles: what it must not choose, and that measured ones win."""

from __future__ import annotations

import json

import pytest

from interlock_mxfp4 import tiles
from interlock_mxfp4.aot import EXPERTS, INNER, LATENT, TOKENS, TOP
from interlock_mxfp4.tiles import Device, Shape, Tiles, candidates, choose, key, pair

KINDS = ("gate_up", "down", "gate_up_mx", "down_mx")


def shape(kind: str, tokens: int) -> Shape:
    sizes = (INNER, LATENT) if kind.startswith("gate_up") else (LATENT, INNER)
    return Shape(kind, tokens, TOP, EXPERTS, *sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_chosen_fits(kind, tokens):
    best = choose(shape(kind, tokens))
    assert best in set(candidates(shape(kind, tokens)))
    assert tiles.shared_bytes(shape(kind, tokens), best) <= Device().shared_bytes
    if kind.endswith("_mx"):
        assert best.outputs == 128


@pytest.mark.parametrize("mxfp8", [False, True])
def test_more_tokens_have_wider_tiles(mxfp8):
    widths = [pair(TOP, tokens, EXPERTS, LATENT, INNER, mxfp8)[0].tokens for tokens in TOKENS]
    assert widths == sorted(widths)
    assert widths[0] == 16
    assert widths[-1] >= 64
    for tokens in TOKENS:
        first, second = pair(TOP, tokens, EXPERTS, LATENT, INNER, mxfp8)
        assert first.tokens == second.tokens


def test_a_few_tokens_are_bound_by_bytes_and_many_by_arithmetic():
    """The bytes of 8 tokens' experts alone take most of the time; of 8192 tokens, a small part."""
    for tokens, low, high in ((8, 0.5, 1.0), (8192, 0.0, 0.5)):
        at = shape("gate_up", tokens)
        weight = 2 * INNER * LATENT * (0.5 + 1 / 32) * tiles.active_experts(at)
        share = weight / Device().bytes_per_s / tiles.seconds(at, choose(at))
        assert low < share < high


def test_active_experts():
    assert tiles.active_experts(shape("down", 1)) == pytest.approx(16)
    assert 895 < tiles.active_experts(shape("down", 8192)) <= 896


def test_numbers_of_tokens_share_tiles_up_to_a_power_of_two():
    assert pair(TOP, 65, EXPERTS, LATENT, INNER, False) == pair(
        TOP, 128, EXPERTS, LATENT, INNER, False
    )


def test_measured_tiles_win(tmp_path, monkeypatch):
    at = shape("down", 16)
    fastest = Tiles(64, 64, 64, 8, 3)
    calls: list[Tiles] = []

    def run(_, candidate):
        calls.append(candidate)
        return 1.0 if candidate == fastest else 2.0

    path = tmp_path / "tiles.json"
    found = tiles.tune([at], run, "a card", path)
    assert set(calls) == set(candidates(at))
    best = found[key(at)]
    assert (best.tokens, best.outputs, best.inputs) == (64, 64, 64) or best in calls
    assert json.loads(path.read_text())["device"] == "a card"
    monkeypatch.setenv(tiles.TABLE_VARIABLE, str(path))
    tiles.measured.cache_clear()
    tiles.choose.cache_clear()
    try:
        assert choose(at) == best
    finally:
        monkeypatch.undo()
        tiles.measured.cache_clear()
        tiles.choose.cache_clear()


def test_a_table_that_is_none_is_one_clear_error(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text("{}")
    monkeypatch.setenv(tiles.TABLE_VARIABLE, str(path))
    tiles.measured.cache_clear()
    with pytest.raises(RuntimeError, match=r"INTERLOCK_MXFP4_TILES=.*no table of tiles"):
        tiles.measured()
    tiles.measured.cache_clear()


def test_without_a_gpu_the_tuner_says_so(tmp_path, capsys):
    import torch

    from interlock_mxfp4.tune import main

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([str(tmp_path / "t.json")]) == 1
    assert capsys.readouterr().err == (
        "interlock_mxfp4.tune: error: torch sees no CUDA device here\n"
    )
