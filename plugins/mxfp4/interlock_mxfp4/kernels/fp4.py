"""What kernels share: decoding MXFP4, quantizing to MXFP8, activations."""

import triton
import triton.language as tl


@triton.jit
def e2m1_value(code):
    """Sign and E2M1 in the low four bits of uint8 to float32, by building the float's bits."""
    sign = (code & 8).to(tl.uint32) << 28
    exponent = ((code >> 1) & 3).to(tl.uint32)
    mantissa = (code & 1).to(tl.uint32)
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    # Without an exponent the mantissa counts halves: 0 or 0.5.
    bits = tl.where(exponent == 0, mantissa * 0x3F000000, normal)
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(scale):
    """2^(scale - 127) as float32; byte 0 is subnormal, so it is no shifted exponent."""
    bits = scale.to(tl.uint32) << 23
    bits = tl.where(scale == 0, 0x00400000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_codes(codes, scales, row, keep, k, K, BK: tl.constexpr):
    """Codes [ROWS, BK / 2] and scales [ROWS, BK / 32] as they are stored; zero beyond K."""
    byte = k // 2 + tl.arange(0, BK // 2)
    group = k // 32 + tl.arange(0, BK // 32)
    q = tl.load(
        codes + row[:, None] * (K // 2) + byte[None, :],
        mask=keep[:, None] & (byte[None, :] < K // 2), other=0,
    )  # fmt: skip
    s = tl.load(
        scales + row[:, None] * (K // 32) + group[None, :],
        mask=keep[:, None] & (group[None, :] < K // 32), other=127,
    )  # fmt: skip
    return q, s


@triton.jit
def unpack_tile(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [ROWS, BK / 2] and scales [ROWS, BK / 32] to values [ROWS, BK] of DTYPE."""
    pairs = tl.join(e2m1_value(codes & 15), e2m1_value(codes >> 4))
    groups = tl.reshape(pairs, (ROWS, BK // 32, 32)) * e8m0_value(scales)[:, :, None]
    return tl.reshape(groups, (ROWS, BK)).to(DTYPE)


@triton.jit
def tanh(x):
    """Tanh in float32: a series near 0, where the quotient of exponentials would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    decay = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def gated(gate, up, beta, linear_beta, SITU: tl.constexpr, BOUNDED: tl.constexpr):
    """SiTU or SwiGLU of float32 tiles: see `interlock.ops.experts.situ_mul`."""
    if SITU:
        if BOUNDED:
            up = linear_beta * tanh(up / linear_beta)
        return beta * tanh(gate / beta) * tl.sigmoid(gate) * up
    return gate * tl.sigmoid(gate) * up


@triton.jit
def mxfp8_scale(x, AXIS: tl.constexpr):
    """E8M0 byte of every group, a group being what lies along AXIS (OCP MX v1.0, section 6.3).

    floor(log2(largest)) - 8, as 8 is E4M3's largest exponent; from the float's bits, which are
    exact where log2 is not, and among which NaN and infinity are the largest, as a maximum of
    floats would lose NaN. They give byte 255, which is NaN.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(magnitude, AXIS) >> 23
    byte = tl.maximum(exponent - 8, 0)
    return tl.where(exponent == 255, 255, byte).to(tl.uint8)


@triton.jit
def mxfp8_value(x, byte):
    """``x`` in units of its scale, saturated at E4M3's 448 and rounded to nearest even."""
    inverse = ((254 - tl.minimum(byte.to(tl.int32), 253)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    return scaled.to(tl.float8e4nv)
