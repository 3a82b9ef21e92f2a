"""Recurrent layers: their states, the rows that use them, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torch import Tensor

#: Added to the sum of squares of a query or key of a delta net.
UNIT_EPS: Final = 1e-6


class LayerState(NamedTuple):
    """The states of all sequences in one layer; slots may be far apart in memory.

    Slot 0 is no sequence's: rows that pad a step read and write it.

    Attributes:
        inputs: [slots, width, channels], the last ones of the short convolution: that of position p
            at p % width. So a token's input replaces none that the token itself needs, and programs
            that share channels need not wait for each other.
        matrices: [slots, heads, keys, values] in float32, or in bfloat16, to which they are rounded
            after each step; None in layers that have none.
    """

    inputs: Tensor
    matrices: Tensor | None


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, for recurrent layers. The host never reads them where kernels run, so a
    captured launch can serve other rows later.

    Attributes:
        slots: int32 [rows]; the slot of each row's state.
        starts: int32 [rows]; the position of its first token. At 0 the state is empty, whatever its
            slot has.
        offsets: int32 [rows + 1], ascending: the step's tokens offsets[i] .. offsets[i + 1] - 1 are
            those of row i, maybe none. Tokens after the last row are padding, and so is a row in
            slot 0.
        one_token: every row has one token, and row i has token i.
        found: what kernels have computed about the rows, kept for the following layers.
    """

    slots: Tensor
    starts: Tensor
    offsets: Tensor
    one_token: bool
    found: dict[int, Tensor] = field(init=False, default_factory=dict)

    def on_host(self) -> list[tuple[int, int, int, int]]:
        """(slot, start, first token, token after the last) of each row with tokens."""
        bounds = self.offsets.tolist()
        rows = zip(self.slots.tolist(), self.starts.tolist(), bounds, bounds[1:], strict=False)
        return [row for row in rows if row[3] > row[2]]


class DeltaNet(NamedTuple):
    """A layer's parameters and sizes, of one rank.

    Attributes:
        key_heads: of queries and of keys; each serves ``value_heads / key_heads`` consecutive
            value heads.
        key_dim, value_dim: elements of a head.
        convolution: [2 * key_heads * key_dim + value_heads * value_dim, width]; of queries,
            keys and values.
        decay, step_bias: float32 [value_heads]; see ``kernels.recurrent.delta``.
        norm, eps: of the result of each head; the weight is [value_dim].
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def channels(self) -> int:
        """Elements of queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Mamba(NamedTuple):
    """The parameters and sizes of a Mamba-2 layer, of one rank.

    Attributes:
        groups: of keys and queries; each serves ``heads / groups`` consecutive heads.
        key_dim, value_dim: elements of a key or query ("state size"), and of a head.
        convolution: [heads * value_dim + 2 * groups * key_dim, width]; of values, keys and queries.
        bias: of the convolution, or None.
        decay, step_bias, skip: float32 [heads]; see ``kernels.recurrent.mamba``.
        limits: the least and the greatest step.
    """

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    convolution: Tensor
    bias: Tensor | None
    decay: Tensor
    step_bias: Tensor
    skip: Tensor
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Elements of all heads' values."""
        return self.heads * self.value_dim
