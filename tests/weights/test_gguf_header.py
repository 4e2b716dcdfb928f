"""Damaged and hostile GGUF files: a clear error, in bounded time and memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

import tinymodels
from interlock.errors import InterlockError, ModelNotFoundError, WeightsError
from interlock.tokenizer import Tokenizer
from interlock.weights.config import load_config
from interlock.weights.gguf_header import GGUFHeader, read_header
from interlock.weights.resolve import local_files


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tinymodels.write_tiny_gguf(path, quant="Q8_0").read_bytes()


def parse(tmp_path: Path, data: bytes) -> GGUFHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return read_header(path)


def patched(data: bytes, position: int, code: str, value: int) -> bytes:
    raw = struct.pack("<" + code, value)
    return data[:position] + raw + data[position + len(raw) :]


def after(data: bytes, name: str) -> int:
    """Position behind a length-prefixed string."""
    raw = name.encode()
    return data.index(struct.pack("<Q", len(raw)) + raw) + 8 + len(raw)


def test_valid_file(tmp_path: Path, valid: bytes) -> None:
    header = parse(tmp_path, valid)
    tensor = header.tensors["blk.0.ffn_down.weight"]
    assert (tensor.shape, tensor.format) == ((64, 128), "Q8_0")
    assert tensor.nbytes == 64 * 128 // 32 * 34 == tensor.rows * tensor.row_bytes
    assert header.architecture == "llama"
    assert len(header.items("tokenizer.ggml.tokens")) == 500
    # Tensor data is padded, so the last tensor ends near the end of the file.
    end = max(t.offset + t.nbytes for t in header.tensors.values())
    assert 0 <= len(valid) - end < 32


def test_magic_and_version(tmp_path: Path, valid: bytes) -> None:
    with pytest.raises(WeightsError, match="is not a GGUF file: it starts with b'GGML'"):
        parse(tmp_path, b"GGML" + valid[4:])
    for version in (0, 1, 4, 99):
        with pytest.raises(WeightsError, match=f"GGUF version {version} is not supported"):
            parse(tmp_path, patched(valid, 4, "I", version))
    with pytest.raises(WeightsError, match="big-endian"):
        parse(tmp_path, patched(valid, 4, "I", 3 << 24))
    assert parse(tmp_path, patched(valid, 4, "I", 2)).version == 2


@pytest.mark.parametrize("count", [2**32, 2**62, 2**64 - 1])
@pytest.mark.parametrize(("position", "what"), [(8, "tensor count"), (16, "metadata count")])
def test_absurd_counts(tmp_path: Path, valid: bytes, position: int, what: str, count: int) -> None:
    tracemalloc.start()
    with pytest.raises(WeightsError, match=f"{what} {count}"):
        parse(tmp_path, patched(valid, position, "Q", count))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_wrong_counts_within_the_file(tmp_path: Path, valid: bytes) -> None:
    for delta in (-1, 1):
        count = struct.unpack_from("<Q", valid, 16)[0] + delta
        with pytest.raises(WeightsError):
            parse(tmp_path, patched(valid, 16, "Q", count))


def test_string_and_array_lengths(tmp_path: Path, valid: bytes) -> None:
    length = after(valid, "general.architecture") + 4
    with pytest.raises(WeightsError, match=r"value of 'general.architecture' .* needs 4611686018"):
        parse(tmp_path, patched(valid, length, "Q", 2**62))
    with pytest.raises(WeightsError, match="key of metadata entry 0 has a length"):
        parse(tmp_path, patched(valid, 24, "Q", 2**62))
    array = after(valid, "tokenizer.ggml.tokens") + 4
    with pytest.raises(WeightsError, match=r"array length of 'tokenizer.ggml.tokens'"):
        parse(tmp_path, patched(valid, array + 4, "Q", 2**61))
    with pytest.raises(WeightsError, match=r"tokens' has unknown value type 77"):
        parse(tmp_path, patched(valid, array, "I", 77))
    with pytest.raises(WeightsError, match="array of arrays"):
        parse(tmp_path, patched(valid, array, "I", 9))


@pytest.mark.parametrize("dim", [2**42 + 1, 2**62, 2**64 - 1, 0, 1, 33])
def test_absurd_dimensions_name_the_tensor(tmp_path: Path, valid: bytes, dim: int) -> None:
    position = after(valid, "blk.1.ffn_gate.weight") + 4
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_gate\.weight"):
        parse(tmp_path, patched(valid, position, "Q", dim))


def test_outer_dimension_overflow(tmp_path: Path, valid: bytes) -> None:
    """Sizes are exact integers: 32 * (2^59 + 1) blocks do not wrap to a small number."""
    position = after(valid, "blk.1.ffn_gate.weight") + 12
    with pytest.raises(WeightsError, match=r"truncated.*incomplete: blk\.1\.ffn_gate\.weight"):
        parse(tmp_path, patched(valid, position, "Q", 2**59 + 1))


def test_dimension_count(tmp_path: Path, valid: bytes) -> None:
    position = after(valid, "output_norm.weight")
    for count in (0, 5, 2**32 - 1):
        with pytest.raises(WeightsError, match=rf"'output_norm\.weight' has {count} dimensions"):
            parse(tmp_path, patched(valid, position, "I", count))


@pytest.mark.parametrize(("kind", "label"), [(250, "250"), (20, r"20 \(IQ4_NL\)"), (24, "24")])
def test_unsupported_type_names_tensor_and_type(
    tmp_path: Path, valid: bytes, kind: int, label: str
) -> None:
    position = after(valid, "blk.0.attn_q.weight") + 4 + 16
    with pytest.raises(WeightsError, match=rf"'blk.0.attn_q.weight' has ggml type {label}"):
        parse(tmp_path, patched(valid, position, "I", kind))


def test_offsets(tmp_path: Path, valid: bytes) -> None:
    position = after(valid, "blk.0.attn_q.weight") + 4 + 16 + 4
    with pytest.raises(WeightsError, match=r"incomplete: blk\.0\.attn_q\.weight"):
        parse(tmp_path, patched(valid, position, "Q", 2**63))
    with pytest.raises(WeightsError, match="is not aligned to 32 bytes"):
        parse(tmp_path, patched(valid, position, "Q", 33))
    with pytest.raises(WeightsError, match="overlap"):
        parse(tmp_path, patched(valid, position, "Q", 0))


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    tinymodels.write_tiny_gguf(path, metadata={"general.alignment": alignment})
    with pytest.raises(WeightsError, match=r"general\.alignment"):
        read_header(path)


def test_custom_alignment_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    plain = read_header(tinymodels.write_tiny_gguf(path))
    assert all(tensor.offset % 32 == 0 for tensor in plain.tensors.values())


def test_truncation_at_many_sizes(tmp_path: Path, valid: bytes) -> None:
    """No prefix of a valid file is accepted, and the error says what is missing."""
    rng = random.Random(1)
    end = max(t.offset + t.nbytes for t in parse(tmp_path, valid).tensors.values())
    sizes = {*range(64), *range(0, len(valid), 1024), end - 1, *rng.sample(range(end), 200)}
    for size in sorted(s for s in sizes if s < end):
        with pytest.raises(WeightsError, match=r"truncated|damaged") as caught:
            parse(tmp_path, valid[:size])
        assert str(size) in str(caught.value)


def test_truncated_data_lists_sizes_and_tensors(tmp_path: Path, valid: bytes) -> None:
    header = parse(tmp_path, valid)
    last = max(header.tensors.values(), key=lambda t: t.offset)
    needed = last.offset + last.nbytes
    with pytest.raises(WeightsError) as caught:
        parse(tmp_path, valid[: last.offset])
    message = str(caught.value)
    assert f"{last.offset} bytes, but its tensors need {needed}" in message
    assert last.name in message


def test_halves_in_the_wrong_order(tmp_path: Path, valid: bytes) -> None:
    half = len(valid) // 2
    with pytest.raises(WeightsError, match="not a GGUF file"):
        parse(tmp_path, valid[half:] + valid[:half])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        read_header(tmp_path / "nothing.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        read_header(tmp_path)


def test_random_damage_never_escapes_as_a_traceback(tmp_path: Path, valid: bytes) -> None:
    """Random bytes anywhere in the header: configuration and tokenizer load, or say why not."""
    rng = random.Random(7)
    path = tmp_path / "m.gguf"
    start = min(t.offset for t in parse(tmp_path, valid).tensors.values())
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(300):
        damaged = bytearray(valid)
        # Half of the damage goes where the sizes and keys are, not the long token lists.
        for _ in range(rng.choice((1, 1, 4))):
            limit = start if rng.random() < 0.5 else 1500
            damaged[rng.randrange(8, limit)] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            files = local_files(path)
            load_config(files)
            Tokenizer.load(files)
            outcomes["loaded"] += 1
        except InterlockError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20
