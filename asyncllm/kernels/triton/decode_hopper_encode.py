"""How a program of ``decode_hopper`` gets its heads: as they are, or encoded on the way, as
``kernels.heads.encode_heads`` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncllm.kernels.triton.decode_hopper_parts import heads_layout


@gluon.jit
def _dims(layer: gl.constexpr):
    """Elements of a head, [head_dim]; and the one that each turns with, or itself."""
    HALF: gl.constexpr = layer.rotary // 2
    dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, heads_layout(layer.head_dim)))
    partner = gl.where(dim < layer.rotary, gl.where(dim < HALF, dim + HALF, dim - HALF), dim)
    return dim, partner


@gluon.jit
def load_turns(rope, position, layer: gl.constexpr):
    """Cosines and sines of each element of a head, [head_dim], long before they are needed.

    The sine is negative where the partner is subtracted.
    """
    HALF: gl.constexpr = layer.rotary // 2
    dim, _ = _dims(layer)
    angle = rope + position * layer.rotary + gl.where(dim < HALF, dim, dim - HALF)
    turns = dim < layer.rotary
    cos = gl.load(angle, mask=turns, other=1.0)
    sin = gl.load(angle + HALF, mask=turns, other=0.0)
    return cos, gl.where(dim < HALF, -sin, sin)


@gluon.jit
def _encode(heads, exists, weight, turns, layer: gl.constexpr):
    """Load heads, normalise and rotate them; [heads, head_dim].

    Each element meets its partner by a second load, not by an exchange between threads.

    Args:
        heads: addresses, [heads].
        exists: which there are.
        weight: of the norm, or None.
        turns: what ``load_turns`` returned, or None.
    """
    dim, partner = _dims(layer)
    mask = exists[:, None] & (dim >= 0)[None, :]
    x = gl.load(heads[:, None] + dim[None, :], mask=mask, other=0.0)
    dtype: gl.constexpr = x.dtype
    y = x
    if turns is not None:
        y = gl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0)
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if weight is not None:
        scale = gl.rsqrt(gl.sum(x * x, 1) / layer.head_dim + layer.eps)[:, None]
        x = _scaled(x * scale, gl.load(weight + dim), dtype, layer)
        if turns is not None:
            y = _scaled(y * scale, gl.load(weight + partner), dtype, layer)
    if turns is not None:
        cos, sin = turns
        x = x * cos[None, :] + y * sin[None, :]
    return x.to(dtype)


@gluon.jit
def _scaled(x, weight, dtype: gl.constexpr, layer: gl.constexpr):
    """Normalised x times the norm's weights, rounded as ``encode_heads`` does; float32."""
    weight = weight.to(gl.float32)[None, :]
    if layer.offset:
        return x * (weight + 1.0)
    else:
        return x.to(dtype).to(gl.float32) * weight


@gluon.jit
def load_heads(memory, piece, turns, layer: gl.constexpr, ENCODES: gl.constexpr):
    """Queries of a group [columns, head_dim], and of the newest token key, in every column, and
    value [head_dim]; both 0 if it does not go with this piece.

    If heads are still to be encoded, key and value are also written to their page.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    lane = gl.arange(0, layer.columns, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    exists = (lane >= 0) & (piece.newest >= 0)
    row = memory.q + piece.row * memory.q_row_stride
    heads = row + (piece.kv_head * layer.group + lane) * memory.q_head_stride
    cell = (memory.place * layer.kv_heads + piece.kv_head) * layer.head_dim
    if ENCODES:
        queries = _encode(heads, lane < layer.group, memory.q_weight, turns, layer)
        number = layer.kv_heads * layer.group + piece.kv_head + lane * 0
        key_head = row + number * memory.q_head_stride
        value_head = key_head + layer.kv_heads * memory.q_head_stride
        key = _encode(key_head, exists, memory.k_weight, turns, layer)
        value = _encode(value_head, exists, None, None, layer)
        mask = ((lane == 0) & exists & (memory.place >= 0))[:, None] & (dim >= 0)[None, :]
        at = cell + (lane * 0)[:, None] + dim[None, :]
        gl.store(memory.k + at, key, mask=mask)
        gl.store(memory.v + at, value, mask=mask)
    else:
        queries = _encode(heads, lane < layer.group, None, None, layer)
        key = _encode(memory.k + cell + lane * 0, exists, None, None, layer)
        value = _encode(memory.v + cell + lane * 0, exists, None, None, layer)
    return queries, key, value


__all__ = ["load_heads", "load_turns"]
