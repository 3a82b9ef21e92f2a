"""From the codes of quantised weights to 16-bit numbers, exactly.

A 4-bit integer becomes the mantissa of a power of two: 128 + code in bfloat16, 1024 + code in
float16, both exact (Kim et al., arXiv 2211.10017). The difference to a zero point in the same form
is exact, too. Of the bits of a small floating-point number, sign, exponent and mantissa only move
to other places; a product makes up for the difference of the exponents' biases.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncllm.kernels.triton.launch import NATIVE


@triton.jit
def offset_codes(codes, DTYPE: tl.constexpr):
    """128 + codes in bfloat16, or 1024 + codes in float16."""
    if tl.bfloat16 == DTYPE:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


def _unpacking(offset: int) -> tl.constexpr:
    """Assembly that puts codes, two at a time, into 16-bit numbers with these upper bits."""
    merge = f"0x000F000F, 0x{offset:04X}{offset:04X}, 0xEA"
    return tl.constexpr(
        f"""{{
        .reg .b32 even, odd;
        prmt.b32 even, $4, 0, 0x3120;
        shr.u32 odd, even, 8;
        lop3.b32 $0, even, {merge};
        lop3.b32 $1, odd, {merge};
        shr.u32 even, even, 4;
        shr.u32 odd, odd, 4;
        lop3.b32 $2, even, {merge};
        lop3.b32 $3, odd, {merge};
        }}"""
    )


_TO_BFLOAT16: tl.constexpr = _unpacking(0x4300)
_TO_FLOAT16: tl.constexpr = _unpacking(0x6400)
_REGISTERS: tl.constexpr = tl.constexpr("=&r,=&r,=&r,=&r,r")


@triton.jit
def unpack(packed, DTYPE: tl.constexpr):
    """The codes in the low and in the high nibbles, as ``offset_codes`` gives them.

    Compiled: two at a time, with one shift and one logical operation.
    """
    if not NATIVE:
        return offset_codes(packed & 15, DTYPE), offset_codes(packed >> 4, DTYPE)
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, _REGISTERS, [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _TO_FLOAT16, _REGISTERS, [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def subtract(codes, zeros, DTYPE: tl.constexpr):
    """The exact difference of two values of ``offset_codes``."""
    if NATIVE:
        return codes - zeros
    else:
        return (codes.to(tl.float32) - zeros.to(tl.float32)).to(DTYPE)


@triton.jit
def fp8_codes(values):
    """float32 [pieces, columns] in e4m3, and the scale of each piece.

    The largest of a piece becomes 448, the largest of e4m3. Whatever rounds rows is to use this, so
    that they become the same, whichever kernel does. 448 / peak is computed in two steps to the
    last bit: otherwise, numbers midway between two codes would get either.
    """
    peak = tl.maximum(tl.max(tl.abs(values), axis=1, keep_dims=True), 1e-12)
    inverse = 1.0 / peak
    factor = 448.0 * inverse
    values *= tl.fma(tl.fma(-factor, peak, 448.0), inverse, factor)
    if not NATIVE:
        # The interpreter does not carry from the mantissa into the exponent.
        bits = values.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(values) < 0.015625, (values + 24576.0) - 24576.0, near)
    return values.to(tl.float8e4nv), peak * (1 / 448)


@triton.jit
def fp8_numbers(w, DTYPE: tl.constexpr):
    """e4m3 to DTYPE, exactly.

    There is no instruction for bfloat16: shift sign, exponent and mantissa into place, and multiply
    by 2^120, the difference of the exponents' biases. (Adding -0 changes nothing; before Hopper
    there is no product of bfloat16 without a sum.)
    """
    if NATIVE and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, rest, factor, zero;
            mov.b32 factor, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 first, $2, 0, 0x1404;
            prmt.b32 second, $2, 0, 0x3424;
            shr.u32 rest, first, 4;
            and.b32 rest, rest, 0x07F007F0;
            lop3.b32 first, first, 0x80008000, rest, 0xEA;
            fma.rn.bf16x2 $0, first, factor, zero;
            shr.u32 rest, second, 4;
            and.b32 rest, rest, 0x07F007F0;
            lop3.b32 second, second, 0x80008000, rest, 0xEA;
            fma.rn.bf16x2 $1, second, factor, zero;
            }""",
            "=&r,=&r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return w.to(DTYPE)


@triton.jit
def mxfp4_numbers(packed):
    """The e2m1 numbers of bytes, times 2^-126, as bfloat16: two for each byte, in two tensors; see
    ``mxfp4_columns``.

    Sign, exponent and mantissa only move to their places there: the exponents' biases differ by
    126, which the scales make up for.

    Args:
        packed: bytes of an ``Mxfp4Matrix``, [rows, bytes].
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 moved, other;
            and.b32 $0, $4, 0x81C081C0;
            shf.r.wrap.b32 moved, $4, $4, 6;
            and.b32 $1, moved, 0x81C081C0;
            shl.b32 moved, $4, 6;
            and.b32 $2, moved, 0x81C081C0;
            shl.b32 moved, $4, 4;
            shr.u32 other, $4, 4;
            lop3.b32 $3, moved, other, 0x81C081C0, 0x28;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        words: tl.constexpr = packed.shape[1] // 4
        parts = tl.reshape(packed, [packed.shape[0], words, 4]).to(tl.uint32)
        j = tl.arange(0, 4)[None, None, :]
        word = tl.sum(parts << 8 * j, axis=2)[:, :, None]
        first = tl.where(j < 2, word, word >> 6 | word << 26) >> 16 * (j % 2)
        second = tl.where(j < 2, word << 6, word << 4 ^ word >> 4) >> 16 * (j % 2)
        return _number(first, packed), _number(second, packed)


@triton.jit
def _number(word, like):
    bits = (word & 0x81C0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(bits, like.shape)


@triton.jit
def mxfp4_columns(COLUMNS: tl.constexpr):
    """The columns of the first numbers of ``mxfp4_numbers``; those of the second are 16 further.
    COLUMNS is a multiple of 128."""
    byte = tl.arange(0, COLUMNS // 2)
    word = byte // 4 % 16
    column = byte // 64 * 128 + word % 4 * 32 + word // 4 * 2 + byte % 4 // 2 * 8 + byte % 2
    return tl.max_contiguous(tl.multiple_of(column, 2), 2)


@triton.jit
def mxfp4_factors(scales):
    """What the numbers of ``mxfp4_numbers`` are multiplied with, the first and the second alike.

    Args:
        scales: uint8 [rows, groups], of an ``Mxfp4Matrix``; bfloat16 has the same exponents.
    """
    rows: tl.constexpr = scales.shape[0]
    blocks: tl.constexpr = scales.shape[1] // 4
    factors = (scales.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    factors = tl.reshape(factors, [rows, blocks, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(factors, [rows, blocks, 4, 4, 4]), [rows, blocks * 64])


@gluon.constexpr_function
def mxfp4_words(warps: int) -> gl.DistributedLinearLayout:
    """Of the words of 16 rows for each warp: a thread has four of a row, and of the row eight
    below."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16 * warps, 16],
    )


#: Of a warpgroup.
MXFP4_WORDS = gl.constexpr(mxfp4_words(4))


def _mxfp4_operand_of_words() -> tl.constexpr:
    """Assembly that makes 32 numbers of four words, in the order of ``mxfp4_operand``."""
    lines = [
        ".reg .b32 even, odd, moved, other, factor, zero;",
        ".reg .b16 low, high;",
        "mov.b32 zero, 0x80008000;",
        "shl.b32 even, $20, 7;",
        "and.b32 even, even, 0x7F807F80;",
        "shr.u32 odd, $20, 1;",
        "and.b32 odd, odd, 0x7F807F80;",
    ]
    for i in range(4):
        word, part, half = f"${16 + i}", ("even", "odd")[i % 2], ("low", "high")[i // 2]
        to = [f"${i % 2 * 8 + 2 * j + i // 2}" for j in range(4)]
        lines += [
            f"mov.b32 {{low, high}}, {part};",
            f"mov.b32 factor, {{{half}, {half}}};",
            f"and.b32 {to[0]}, {word}, 0x81C081C0;",
            f"shf.r.wrap.b32 moved, {word}, {word}, 6;",
            f"and.b32 {to[1]}, moved, 0x81C081C0;",
            f"shl.b32 moved, {word}, 6;",
            f"and.b32 {to[2]}, moved, 0x81C081C0;",
            f"shl.b32 moved, {word}, 4;",
            f"shr.u32 other, {word}, 4;",
            f"lop3.b32 {to[3]}, moved, other, 0x81C081C0, 0x28;",
            *(f"fma.rn.bf16x2 {place}, {place}, factor, zero;" for place in to),
        ]
    return tl.constexpr("\n".join(["{", *lines, "}"]))


_MXFP4_OPERAND: tl.constexpr = _mxfp4_operand_of_words()


@gluon.jit
def mxfp4_operand(words, scales):
    """The first operand of a warpgroup's product, [64, 128] bfloat16, of words with eight codes of
    a group each, [64, 16] in ``MXFP4_WORDS``; see ``mxfp4_numbers``. No number changes its thread.

    Args:
        scales: int32 [64]; the bytes of four groups.
    """
    ROWS: gl.constexpr = words.shape[0]
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, words.type.layout))
    t0, t1, t2, t3, t4, t5, t6, t7 = gl.inline_asm_elementwise(
        _MXFP4_OPERAND,
        "=&r," * 16 + "r,r,r,r,r,r,r,r",
        [words, scales[:, None] | (k * 0)[None, :]],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=4,
    )
    low = gl.join(gl.join(t0, t1), gl.join(t2, t3))
    high = gl.join(gl.join(t4, t5), gl.join(t6, t7))
    parts = gl.reshape(gl.join(low, high), [ROWS, 4, 2, 2, 2, 2, 2])
    return gl.reshape(gl.permute(parts, [0, 2, 6, 5, 4, 1, 3]), [ROWS, 128])


@triton.jit
def scaled(numbers, factors):
    """The products of bfloat16, of which no bit is lost."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [numbers, factors],
            tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        # The interpreter's own conversion loses subnormal numbers.
        bits = numbers.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return (bits.to(tl.float32, bitcast=True) * factors.to(tl.float32)).to(tl.bfloat16)
