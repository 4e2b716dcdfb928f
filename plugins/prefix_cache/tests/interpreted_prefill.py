"""The prefill kernel in Triton's interpreter; run by `test_prefix_cache_kernel.py`."""

from __future__ import annotations

import pytest
import torch

from interlock_prefix_cache.kernels import prefill, reference

NAN = float("nan")
HEADS, KEYS, VALUES = 2, 32, 20


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, seed: int = 0):
    raw = [draw(tokens, HEADS, KEYS, seed=seed + i) for i in (1, 2)]
    q, k = (torch.nn.functional.normalize(each, dim=-1) for each in raw)
    v = draw(tokens, HEADS, VALUES, seed=seed + 3)
    g = -5 * torch.sigmoid(draw(tokens, HEADS, KEYS, seed=seed + 4))
    return q * KEYS**-0.5, k, v, g, torch.sigmoid(draw(tokens, HEADS, seed=seed + 5))


def both(lengths, exports, seed=0):
    """Outputs and states of the kernel and of the reference, from the same random states."""
    count = len(lengths)
    given = inputs(sum(lengths), seed)
    states = draw(count + 8, HEADS, KEYS, VALUES, seed=seed + 9)
    states[count:] = NAN
    slots = list(range(count))[::-1]
    found, wanted = states.clone(), states.clone()
    out = torch.full(given[2].shape, NAN)
    out = prefill.kda_prefill(*given, found, lengths, slots, exports, out=out, block=16)
    exact = reference.kda_prefill(*given, wanted, lengths, slots, exports)
    return out, exact, found, wanted


CASES = {
    "one token": ([1], [[]]),
    "a chunk": ([16], [[]]),
    "a checkpoint": ([33], [[(16, 3)]]),
    "two checkpoints": ([50], [[(16, 3), (48, 4)]]),
    "the last position": ([49], [[(48, 2)]]),
    "packed": ([17, 1, 40, 16], [[(16, 5)], [], [(16, 6), (32, 7)], []]),
    "an empty one between": ([20, 0, 18], [[(16, 4)], [], [(16, 5)]]),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name):
    out, exact, found, wanted = both(*CASES[name])
    assert torch.allclose(out, exact, rtol=1e-4, atol=1e-5)
    untouched = wanted.isnan()
    assert torch.equal(found.isnan(), untouched)
    assert torch.allclose(found[~untouched], wanted[~untouched], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", [16, 32, 48, 64])
def test_a_checkpoint_is_bitwise_the_end_of_that_prefix(position):
    given, state = inputs(70), draw(1, HEADS, KEYS, VALUES, seed=9)
    states = torch.cat([state, torch.full_like(state, NAN)])
    prefill.kda_prefill(*given, states, [70], [0], [[(position, 1)]], block=16)
    alone = state.clone()
    prefill.kda_prefill(*(x[:position] for x in given), alone, [position], [0], [[]], block=16)
    assert torch.equal(states[1], alone[0])
    # And going on from it is bitwise the rest of the whole run.
    rest = states[1:].clone()
    prefill.kda_prefill(*(x[position:] for x in given), rest, [70 - position], [0], [[]], block=16)
    assert torch.equal(rest[0], states[0])


def test_neighbours_change_nothing():
    given, state = inputs(40), draw(3, HEADS, KEYS, VALUES, seed=9)
    packed = state.clone()
    out = prefill.kda_prefill(*given, packed, [11, 20, 9], [0, 1, 2], [[], [], []], block=16)
    alone = state[1:2].clone()
    part = prefill.kda_prefill(*(x[11:31] for x in given), alone, [20], [0], [[]], block=16)
    assert torch.equal(out[11:31], part)
    assert torch.equal(packed[1], alone[0])


def test_decay_without_a_bound_overflows_nothing():
    q, k, v, g, beta = inputs(40)
    state = draw(1, HEADS, KEYS, VALUES)
    for factor in (50.0, 1000.0):
        out = prefill.kda_prefill(q, k, v, g * factor, beta, state.clone(), [40], [0], [[]])
        exact = reference.kda_prefill(q, k, v, g * factor, beta, state.clone(), [40], [0], [[]])
        assert torch.allclose(out, exact, rtol=1e-4, atol=1e-5)


def test_as_the_core_s_op():
    from interlock.ops import kda

    given, state = inputs(50), draw(HEADS, KEYS, VALUES)
    found = prefill.kda_chunk(*given, state, [16, 32])
    wanted = kda.kda_chunk(*given, state, [16, 32])
    pairs = [(found[0], wanted[0]), (found[1], wanted[1]), *zip(found[2], wanted[2], strict=True)]
    for a, b in pairs:
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [[(8, 1)], [(0, 1)], [(48, 1)], [(16, 1), (32, 2), (16, 3)]])
def test_what_cannot_be_exported_is_refused(wanted):
    states = torch.zeros(4, HEADS, KEYS, VALUES)
    with pytest.raises(ValueError, match="at multiples of 16 inside"):
        prefill.kda_prefill(*inputs(48), states, [48], [0], [wanted])
