"""Incremental text: whole characters, stop strings, the same text for every partition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.outputs import TextStream

BYTES = {i: bytes([i]) for i in range(256)}


def stream(data: bytes, stops=(), include=False) -> tuple[list[str], TextStream]:
    """One byte per token, the finest partition there is."""
    text = TextStream(BYTES.__getitem__, stops, include)
    pieces = []
    for byte in data:
        pieces.append(text.push(byte))
        if text.stopped_by is not None:
            return pieces, text
    return [*pieces, text.finish()], text


@pytest.mark.parametrize("whole", ["\U0001fae0", "龜", "ď", "a\U0001fae0 b龜", "", "plain"])
def test_characters_are_never_split(whole):
    pieces, _ = stream(whole.encode())
    assert "".join(pieces) == whole
    assert not any("�" in piece for piece in pieces)


def test_the_end_in_mid_character_gives_one_replacement():
    pieces, _ = stream("ok\U0001fae0".encode()[:-1])
    assert "".join(pieces) == "ok�"


def test_a_space_after_half_a_character_does_not_raise():
    pieces, _ = stream("\U0001fae0".encode()[:2] + b" next")
    assert "".join(pieces) == "� next"


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped_by"),
    [
        ("hello world", ["lo"], "hel", "lo"),
        ("as it am here", ["it am"], "as ", "it am"),
        ("x<|im_end|>\ny", ["<|im_end|>\n"], "x", "<|im_end|>\n"),
        ("Thought\nObservation: 3", ["Observation:"], "Thought\n", "Observation:"),
        ("abc", ["abc", "b"], "a", "b"),
        ("xabc", ["bc", "abc"], "x", "abc"),
        ("aaab", ["aab"], "a", "aab"),
        ("no match <|im", ["<|im_end|>"], "no match <|im", None),
        ("naïve 龜!", ["龜"], "naïve ", "龜"),
    ],
)
def test_stop_strings_end_the_text_before_the_first_match(text, stops, expected, stopped_by):
    pieces, state = stream(text.encode(), stops)
    assert ("".join(pieces), state.stopped_by) == (expected, stopped_by)
    included, _ = stream(text.encode(), stops, include=True)
    assert "".join(included) == expected + (stopped_by or "")


@given(
    st.text(alphabet="abé龜<", max_size=30),
    st.lists(st.text(alphabet="abé龜<", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 5), max_size=60),
)
def test_every_partition_gives_the_same_text(text, stops, include, sizes):
    data = text.encode()
    fine, state = stream(data, stops, include)
    table: dict[int, bytes] = {}
    position = 0
    for index, size in enumerate([*sizes, *[3] * len(data)]):
        if position < len(data):
            table[index] = data[position : position + size]
            position += size
    coarse, pieces = TextStream(table.__getitem__, stops, include), []
    for token in table:
        pieces.append(coarse.push(token))
        if coarse.stopped_by is not None:
            break
    else:
        pieces.append(coarse.finish())
    assert "".join(pieces) == "".join(fine)
    assert coarse.stopped_by == state.stopped_by
