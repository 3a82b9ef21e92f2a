"""The data that kernels, their references and their callers exchange."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Final, Literal, NamedTuple

from torch import Tensor

#: Rows and columns of an fp8 weight, or columns of the activations, that share a scale.
FP8_BLOCK: Final = 128
#: The largest e4m3 number.
FP8_MAX: Final = 448.0
#: Numbers of an mxfp4 matrix that share a scale.
MXFP4_BLOCK: Final = 32
#: Columns of an mxfp4 matrix are padded to a multiple of this.
MXFP4_COLUMNS: Final = 128
#: The greatest exponent of an mxfp4 matrix, plus 127, that kernels take.
MXFP4_MAX_SCALE: Final = 128
#: What is added to the exponents of its scales: its numbers are 2^-126 times what they should be.
MXFP4_SHIFT: Final = 126
#: The most columns of an int4 weight that are packed together.
INT4_BLOCK: Final = 128


class Norm(NamedTuple):
    """x / rms(x) * weight, over the last dimension.

    Attributes:
        weight: [size].
        eps: added to the mean of squares.
        offset: multiply by weight + offset, all in float32: 1 in Gemma, 0 in Gemma 4. With None, x
            is normalised in float32 and rounded to its dtype before it is multiplied by the weight.
    """

    weight: Tensor
    eps: float
    offset: float | None = None


class HeadEncoding(NamedTuple):
    """Norms of the heads, rotary positions and sinks; None for those a model lacks.

    ``rope`` is float32 [max_length, rotary_dim]: the cosines of each position, then the sines.
    For the elements that are rotated together see ``AttentionSpec.pair_distance``.
    ``sinks``, [num_heads], in layers that have them: see ``AttentionSpec.has_sinks``.
    ``normalizes_values``: value heads are divided by their root mean square, with the epsilon of
    the other norms, which are there.
    """

    q_norm: Norm | None
    k_norm: Norm | None
    rope: Tensor | None
    sinks: Tensor | None = None
    normalizes_values: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    Attributes:
        layer: index of the layer.
        num_heads, num_kv_heads, head_dim: of this layer; ``num_heads % num_kv_heads == 0``.
        scale: factor of the dot products.
        window: None, or how many positions (its own included) a query sees.
        softcap: None, or c in ``c * tanh(score / c)``, applied after ``scale``.
        has_sinks: each head has a score of its own, which takes a share of the softmax's weight
            and has no value (Xiao et al., arXiv 2309.17453). It is not scaled or capped.
        shares: None, or the earlier layer whose K and V this layer reads: it has none of its own.
        values_are_keys: values are the keys before their encoding.
        pair_distance: element i of a head is rotated together with element i + pair_distance, for i
            below rotary_dim / 2; None: that is the distance, too.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    shares: int | None = None
    values_are_keys: bool = False
    pair_distance: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kind(self) -> AttentionSpec:
        """Equal for two layers whose attention differs only in the pages that they use."""
        return replace(self, layer=0, shares=None if self.shares is None else 0)

    @property
    def kv_layer(self) -> int:
        """The layer whose pages hold its K and V."""
        return self.layer if self.shares is None else self.shares

    @property
    def kv_size(self) -> int:
        """Elements of K and V of one token that this layer keeps."""
        return 2 * self.num_kv_heads * self.head_dim if self.shares is None else 0

    @property
    def projected_heads(self) -> tuple[int, int, int]:
        """Query, key and value heads that the layer's projection yields, in this order."""
        keys = self.num_kv_heads if self.shares is None else 0
        return self.num_heads, keys, 0 if self.values_are_keys else keys

    @property
    def projected_size(self) -> int:
        """Elements that the layer's projection yields of a token."""
        return sum(self.projected_heads) * self.head_dim

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of a projection's output: [tokens, heads, head_dim] each.

        With ``values_are_keys`` k and v are the same view; with ``shares`` both have no heads.
        """
        sizes = self.projected_heads
        heads = qkv.view(len(qkv), sum(sizes), self.head_dim)
        q, k, v = heads.split_with_sizes(sizes, dim=1)
        return q, k, k if self.values_are_keys else v


class DecodeRows(NamedTuple):
    """Rows of one new token each, and the pages of a layer; see ``kernels.attention``.

    ``slots``, int [rows], are those of the sequences. ``lengths``, int [rows], are the positions
    that are written, the new one included; 0 for padding. ``scales``: see ``kernels.attention``.
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    slots: Tensor
    lengths: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of any number of new tokens. The host never reads them, so a captured launch can serve
    other rows later.

    Attributes:
        slots, starts: integers [rows]: the sequence of each row, and the position of its first
            new token.
        q_offsets: integers [rows + 1], ascending: the step's tokens q_offsets[i] ..
            q_offsets[i + 1] - 1 are those of row i. A row may have none. Tokens before the first
            row and after the last one belong to no row.
        tiles: what kernels have computed about the rows, kept for the following layers.
    """

    slots: Tensor
    starts: Tensor
    q_offsets: Tensor
    tiles: dict[tuple[int, int], Tensor] = field(init=False, default_factory=dict)


class Tokens(NamedTuple):
    """The tokens of a step, int64 [tokens] each.

    ``slot_mapping`` is where their K and V go in the flattened pages, -1 for padding. Padding has
    id 0 and position 0.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


class Fp8Matrix(NamedTuple):
    """A matrix whose elements are ``data * scale``.

    Attributes:
        data: float8_e4m3fn [N, K].
        scale: float32, one for each row [N, 1], or for each block [ceil(N / FP8_BLOCK),
            ceil(K / FP8_BLOCK)].
    """

    data: Tensor
    scale: Tensor

    @property
    def is_blocked(self) -> bool:
        """Whether there is a scale for each block, not for each row."""
        return self.scale.shape != (self.data.shape[0], 1)

    def rows(self, start: int, end: int) -> Fp8Matrix:
        """A view of some rows, starting at a multiple of FP8_BLOCK."""
        if self.is_blocked:
            scale = self.scale[start // FP8_BLOCK : -(-end // FP8_BLOCK)]
            return Fp8Matrix(self.data[start:end], scale)
        return Fp8Matrix(self.data[start:end], self.scale[start:end])

    def columns(self, start: int, end: int) -> Fp8Matrix:
        """A view of some columns; with blocks, ``start`` is a multiple of FP8_BLOCK."""
        scale = self.scale
        if self.is_blocked:
            scale = scale[:, start // FP8_BLOCK : -(-end // FP8_BLOCK)]
        return Fp8Matrix(self.data[:, start:end], scale)


class Int4Matrix(NamedTuple):
    """A matrix [N, K] whose elements are ``(code - zero) * scale``.

    Each ``block`` columns of a row are half as many bytes: the low nibbles are the codes of the
    first half of the columns, the high nibbles those of the second half.

    Attributes:
        packed: uint8 [N, K / 2].
        scale: float16 or float32 [K / group, N]: groups are consecutive columns.
        zero: uint8 [K / group, N], at most 16.
        order: int64 [K], or None: column j of the matrix multiplies element ``order[j]`` of x.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None = None

    @property
    def group(self) -> int:
        """Columns that share a scale and a zero point."""
        return 2 * self.packed.shape[1] // self.scale.shape[0]

    @property
    def block(self) -> int:
        """Columns that are packed together."""
        return packed_block(self.group)

    def rows(self, start: int, end: int) -> Int4Matrix:
        """A view of some rows."""
        return Int4Matrix(
            self.packed[start:end], self.scale[:, start:end], self.zero[:, start:end], self.order
        )

    def columns(self, start: int, end: int) -> Int4Matrix:
        """A view of some whole groups of columns; not if there is an ``order``."""
        assert self.order is None, "its columns are those of any element"
        groups = slice(start // self.group, end // self.group)
        packed = self.packed[:, start // 2 : end // 2]
        return Int4Matrix(packed, self.scale[groups], self.zero[groups])


class Mxfp4Matrix(NamedTuple):
    """A matrix [N, K] of 4-bit floating-point numbers (e2m1), scaled in groups of 32 columns.

    Columns are padded to a multiple of MXFP4_COLUMNS; ``kernels.quantized`` tells where bits are.

    Attributes:
        packed: uint8 [N, padded K / 2].
        scale: uint8 [N, padded K / 32]; exponents of 2, plus 127, up to MXFP4_MAX_SCALE; plus
            MXFP4_SHIFT.
    """

    packed: Tensor
    scale: Tensor


def packed_block(group: int) -> int:
    """``Int4Matrix.block`` for groups of this many columns."""
    return gcd(group, INT4_BLOCK)


#: The weight of a projection.
Weight = Tensor | Fp8Matrix | Int4Matrix


class Routing(NamedTuple):
    """How experts are chosen and weighted from a router's logits.

    Attributes:
        top_k: experts that a token chooses.
        scores: what logits become: probabilities of all experts, or of each by itself.
        normalize: the weights of a token sum to ``factor``; otherwise, they are scores * factor.
        groups, top_groups: experts are so many groups of equal size, and a token chooses among
            those of its best ``top_groups``. The score of a group is that of its best expert or,
            with "sigmoid", the sum of its best two.
        shared: experts, numbered after those to choose from, that every token goes through.
        has_gate: their weight is the sigmoid of one more logit; otherwise it is 1.
        sharpness: factor of the logits of experts.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    normalize: bool
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    has_gate: bool = False
    sharpness: float = 1.0

    @property
    def used(self) -> int:
        """Experts that a token goes through."""
        return self.top_k + self.shared


class Gated(NamedTuple):
    """What is weighted by the sigmoid of a logit.

    Attributes:
        values: [tokens, size], contiguous.
        logit: [tokens, 1]; rows in any distance.
    """

    values: Tensor
    logit: Tensor


#: The matrices of all experts: [experts, N, K], or quantised as one of [experts * N, K].
ExpertWeight = Tensor | Fp8Matrix | Int4Matrix | Mxfp4Matrix


class GatedExperts(NamedTuple):
    """The MLPs of experts: down(act(gate(x)) * up(x)).

    Attributes:
        num_experts: their number.
        gate_up: of 2 * inner rows each: those of gate, then those of up.
        down: of as many rows as x has columns.
        gate_up_bias, down_bias: [experts, 2 * inner] and [experts, hidden], or None.
        act: of the gate. "clamped" is gpt-oss's: ``(up + 1) * gate * sigmoid(alpha * gate)``, of a
            gate of at most ``limit``, and up between that and its negative.
        paired: rows of gate and up alternate instead.
    """

    num_experts: int
    gate_up: ExpertWeight
    down: ExpertWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    act: str = "silu"
    paired: bool = False
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def inner_size(self) -> int:
        """The inner features of an expert."""
        codes = self.gate_up if isinstance(self.gate_up, Tensor) else self.gate_up[0]
        return codes.numel() // codes.shape[-1] // self.num_experts // 2
