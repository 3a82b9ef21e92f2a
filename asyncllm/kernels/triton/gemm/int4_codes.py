"""From 4-bit codes to floating point.

A code becomes the mantissa of a power of two: 128 + code in bfloat16, 1024 + code in float16, both
exact (Kim et al., arXiv 2211.10017). The difference to a zero point in the same form is exact, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
