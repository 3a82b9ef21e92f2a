"""The seam between models and attention kernels.

A model describes each of its attention layers once (``AttentionSpec``) and, in a step, calls
``batch.attend(spec, qkv, encoding)``. A backend turns the step's rows into a plan shared by all
layers and reads and writes the paged KV cache. Nothing else knows how pages are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from torch import Tensor

from asyncllm.kernels.types import AttentionSpec, HeadEncoding


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over the paged KV cache."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> Any:
        """Prepare one step.

        Args:
            rows: int32 [n, 3] of (slot, start, q_len) on the host: row i brings the tokens at
                positions start .. start+q_len-1 of the sequence in that slot. Tokens of all rows
                are concatenated in this order in q, k and v.
            block_table: int32 [slots, max_pages] on the device; page numbers by slot.

        Returns:
            What ``forward`` needs for this step; the same for every layer.
        """

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """Encode queries and keys, write K and V to their pages, then attend.

        Args:
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: the projections of queries,
                keys and values. May be overwritten.
            batch: the step, with the plan for it.

        Returns:
            [tokens, num_heads * head_dim], same dtype as qkv.
        """


@runtime_checkable
class EndsBackend(AttentionBackend, Protocol):
    """A backend that can attend the sampling tokens alone."""

    def forward_ends(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """As ``forward``, of the tokens in ``batch.ends``: [samples, num_heads * head_dim]."""


class Ends(NamedTuple):
    """Of each token that yields logits, ints [samples]: its slot, and the length of its sequence up
    to and with it, 0 for padding."""

    slots: Tensor
    lengths: Tensor


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it.

    Attributes:
        input_ids: int64 [tokens].
        positions: int64 [tokens], of each token in its own sequence.
        written: int64 [tokens]; where its K and V go in the flattened pages, -1 for nowhere.
        sample_rows: int64 [samples]; indices into tokens whose hidden state yields logits. None:
            all tokens do.
        plan: of the backend, for this step.
        ends: of the tokens in ``sample_rows``, if the backend shall attend them alone where no
            others are needed.
        ending: the layer is the last one. It writes K and V of all tokens, but whatever comes after
            is computed of those that yield logits.
    """

    input_ids: Tensor
    positions: Tensor
    written: Tensor
    sample_rows: Tensor | None
    backend: AttentionBackend
    plan: Any
    ends: Ends | None = None
    ending: bool = False

    def for_last_layer(self) -> Self:
        """The same step, ``ending`` if that leaves fewer tokens, yet some."""
        if self.sample_rows is None or not 0 < len(self.sample_rows) < len(self.input_ids):
            return self
        return replace(self, ending=True)

    def attend(self, spec: AttentionSpec, qkv: Tensor, encoding: HeadEncoding) -> Tensor:
        """See ``AttentionBackend.forward``; of the tokens that are ``needed``."""
        if self.ending and self.ends is not None and isinstance(self.backend, EndsBackend):
            return self.backend.forward_ends(qkv, spec, encoding, self)
        return self.needed(self.backend.forward(qkv, spec, encoding, self))

    def needed(self, x: Tensor) -> Tensor:
        """The rows of x, [tokens, size], that are needed behind the attention of this layer."""
        return self.sampling(x) if self.ending else x

    def sampling(self, x: Tensor) -> Tensor:
        """The rows of x, [tokens, size], that yield logits."""
        return x if self.sample_rows is None else x.index_select(0, self.sample_rows)


class KVPages(Protocol):
    """The paged K and V storage of every layer, as attention backends see it."""

    page_size: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_pages, page_size, num_kv_heads, head_dim]."""
