"""Packed FP4 weights against compressed-tensors, which writes them."""

from __future__ import annotations

import torch

from interlock.weights.packed_fp4 import pack, unpack
from oracle.required import oracle

helpers = oracle("compressed_tensors.compressors.nvfp4.helpers")
scales = oracle("compressed_tensors.compressors.mx_utils")


def test_every_byte_means_the_same():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.randint(100, 150, (2, 8), dtype=torch.uint8)
    values = helpers.unpack_fp4_from_uint8(packed, 2, 256, dtype=torch.bfloat16)
    factors = scales.decompress_mx_scale(scale)
    wanted = values * factors.repeat_interleave(32, 1)
    assert torch.equal(unpack(packed, scale, torch.bfloat16), wanted)


def test_what_we_pack_they_unpack():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = pack(weight)
    values = helpers.unpack_fp4_from_uint8(packed, 5, 64, dtype=torch.float32)
    factors = scales.decompress_mx_scale(scale).float()
    wanted = values * factors.repeat_interleave(32, 1)
    assert torch.equal(unpack(packed, scale, torch.float32), wanted)
