"""How a program of ``decode_hopper`` loads its heads, and encodes them if need be."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncllm.kernels.triton.attention.decode_encode import partners, scaled
from asyncllm.kernels.triton.attention.decode_hopper_parts import heads_layout


@gluon.jit
def _dims(layer: gl.constexpr):
    """Elements of a head, [head_dim]."""
    return gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, heads_layout(layer.head_dim)))


@gluon.jit
def load_turns(rope, position, layer: gl.constexpr):
    """Load early the cosines and sines of each element of a head, [head_dim].

    The sine is negative where the partner is subtracted.
    """
    HALF: gl.constexpr = layer.rotary // 2
    dim = _dims(layer)
    angle = rope + position * layer.rotary + gl.where(dim < HALF, dim, dim - HALF)
    turns = dim < layer.rotary
    cos = gl.load(angle, mask=turns, other=1.0)
    sin = gl.load(angle + HALF, mask=turns, other=0.0)
    return cos, gl.where(dim < HALF, -sin, sin)


@gluon.jit
def load_heads(memory, piece, turns, layer: gl.constexpr, ENCODES: gl.constexpr):
    """Queries of a group, then key and value of the newest token; [lanes, head_dim].

    Key and value are 0 if the newest token does not belong to this piece. If ENCODES, heads are
    encoded as by ``kernels.attention.encode_heads``, and key and value written to their page.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    lane = gl.arange(0, layer.lanes, layout=gl.SliceLayout(1, LAYOUT))
    dim = _dims(layer)
    is_query = lane < layer.group
    is_key = lane == layer.group
    is_new = (lane >= layer.group) & (lane < layer.group + 2) & (piece.newest >= 0)
    exists = is_query | is_new
    row = memory.q + piece.row * memory.q_row_stride
    cell = (memory.place * layer.kv_heads + piece.kv_head) * layer.head_dim
    page = gl.where(is_key, memory.k + cell, memory.v + cell)
    query = piece.kv_head * layer.group + lane
    if ENCODES:
        # A row has all queries, then all keys, then all values.
        number = gl.where(is_query, query, lane * layer.kv_heads + piece.kv_head)
        heads = _encode(row + number * memory.q_head_stride, exists, memory, turns, layer)
        mask = (is_new & (memory.place >= 0))[:, None] & (dim >= 0)[None, :]
        gl.store(page[:, None] + dim[None, :], heads, mask=mask)
    else:
        at = gl.where(is_query, row + query * memory.q_head_stride, page)
        mask = exists[:, None] & (dim >= 0)[None, :]
        heads = gl.load(at[:, None] + dim[None, :], mask=mask, other=0.0)
    return heads


@gluon.jit
def _encode(heads, exists, memory, turns, layer: gl.constexpr):
    """Load heads of a group, and normalise and rotate all but the value; [lanes, head_dim].

    The rotary partner of each element is loaded as well, not exchanged between threads.

    Args:
        heads: addresses, [lanes].
        exists: mask of heads, [lanes].
        turns: of ``load_turns``, or None.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    lane = gl.arange(0, layer.lanes, layout=gl.SliceLayout(1, LAYOUT))
    dim = _dims(layer)
    partner = partners(dim, layer.rotary, layer.rotary // 2)
    mask = exists[:, None] & (dim >= 0)[None, :]
    plain = gl.load(heads[:, None] + dim[None, :], mask=mask, other=0.0)
    dtype: gl.constexpr = plain.dtype
    x = plain.to(gl.float32)
    y = x
    if turns is not None:
        y = gl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0).to(gl.float32)
    if memory.q_weight is not None:
        weight = gl.where(lane < layer.group, memory.q_weight, memory.k_weight)[:, None]
        scale = gl.rsqrt(gl.sum(x * x, 1) / layer.head_dim + layer.eps)[:, None]
        x = scaled(x * scale, gl.load(weight + dim[None, :]), layer.offset, dtype)
        if turns is not None:
            y = scaled(y * scale, gl.load(weight + partner[None, :]), layer.offset, dtype)
    if turns is not None:
        cos, sin = turns
        x = x * cos[None, :] + y * sin[None, :]
    return gl.where((lane <= layer.group)[:, None], x.to(dtype), plain)
