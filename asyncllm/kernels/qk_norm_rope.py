"""What happens to queries, keys and values between their projection and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels
from asyncllm.kernels.norm import Norm, rms_norm_reference

if TYPE_CHECKING:
    from asyncllm.attention.base import AttentionSpec


class HeadEncoding(NamedTuple):
    """The norm of each query and each key head, and rotary positions; None where there is none.

    ``rope`` is float32 [max_length, rotary_dim]: of each position the cosines, then the sines.
    Element i of a head turns with element i + rotary_dim / 2.
    """

    q_norm: Norm | None
    k_norm: Norm | None
    rope: Tensor | None


def encode_heads(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    written: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate queries and keys in place, and write K and V to their pages.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries, keys, values.
        positions: int64 [tokens].
        keys, values: [num_pages, page_size, num_kv_heads, head_dim], contiguous.
        written: int64 [tokens]; where each token goes in the flattened pages, -1 for nowhere.

    Returns:
        Views of qkv: q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim].
    """
    if has_triton_kernels(qkv):
        from asyncllm.kernels.triton.qk_norm_rope import encode_heads as launch

        launch(qkv, spec, encoding, positions, keys, values, written)
        return split_heads(qkv, spec)
    return encode_heads_reference(qkv, spec, encoding, positions, keys, values, written)


def split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views: [tokens, heads of each, head_dim]."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, spec.head_dim)
    q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def encode_heads_reference(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    written: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``encode_heads`` in plain torch."""
    q, k, v = split_heads(qkv, spec)
    for heads, norm in ((q, encoding.q_norm), (k, encoding.k_norm)):
        encoded = heads if norm is None else rms_norm_reference(heads, norm)
        if encoding.rope is not None:
            encoded = _rotate(encoded, encoding.rope.index_select(0, positions))
        if encoded is not heads:
            heads.copy_(encoded)
    _write(keys, k, written)
    _write(values, v, written)
    return q, k, v


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the leading dimensions of each head; x [tokens, heads, head_dim]."""
    cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _write(pages: Tensor, heads: Tensor, written: Tensor) -> None:
    kept = written >= 0
    if not bool(kept.all()):
        heads, written = heads[kept], written[kept]
    pages.flatten(0, 1).index_copy_(0, written, heads)


__all__ = ["HeadEncoding", "encode_heads", "encode_heads_reference", "split_heads"]
