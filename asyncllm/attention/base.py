"""The interface between models and attention backends.

A model describes each of its attention layers once (``AttentionSpec``) and, in a step, calls
``batch.attend(spec, qkv, encoding)``. A backend turns the step's rows into a plan shared by all
layers, and reads and writes the paged KV cache. Nothing else knows the layout of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from torch import Tensor

from asyncllm.kernels.types import AttentionSpec, HeadEncoding, PrefillRows
from asyncllm.kernels.types.recurrent import LayerState, StateRows


def count_decode_rows(rows: np.ndarray) -> int:
    """How many rows come before the first one that has not exactly one token.

    Args:
        rows: int [n, 3] of (slot, start, q_len).
    """
    longer = np.flatnonzero(rows[:, 2] != 1)
    return int(longer[0]) if longer.size else len(rows)


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over the paged KV cache."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> Any:
        """Prepare one step; ``forward`` takes the result in every layer.

        Args:
            rows: int32 [n, 3] of (slot, start, q_len) on the host, n > 0: row i has the tokens at
                positions start .. start+q_len-1 of the sequence in that slot. Tokens of all rows
                are concatenated in this order in q, k and v.
            block_table: int32 [slots, max_pages] on the device; page numbers by slot.
        """

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """Encode heads, write K and V to their pages if they are the layer's own, then attend.

        Args:
            qkv: [tokens, projected_size]; see ``AttentionSpec``. May be overwritten.

        Returns:
            [tokens, num_heads * head_dim], same dtype as qkv.
        """


@runtime_checkable
class LogitRowsBackend(AttentionBackend, Protocol):
    """A backend that can attend only the tokens that yield logits."""

    def forward_logit_rows(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """As ``forward``, for ``batch.logit_rows``: [samples, num_heads * head_dim].

        After ``ForwardBatch.of_logit_rows`` qkv is of these alone.
        """


class GraphRows(NamedTuple):
    """The rows of a captured step: buffers whose contents differ from replay to replay.

    Attributes:
        num_tokens: of the step, with padding.
        slots: int32 [rows].
        decode_lengths: int32 [rows]; the sequence length of decode rows, their own token included.
            Decode rows have one token and come first. 0 for all other rows, and for padding.
        prefill: the rows that are not decode rows; None if the step has decode rows only.
        apart: each token is a decode row of its own, also if it follows another one of its slot.
    """

    num_tokens: int
    slots: Tensor
    decode_lengths: Tensor
    prefill: PrefillRows | None
    apart: bool = False


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps can be captured in CUDA graphs.

    Attributes:
        plans_on_host: ``before_replay`` must be told where rows start; it is not enough that the
            captured kernels find that on the device.
    """

    plans_on_host: bool

    def graph_plan(self, rows: GraphRows, block_table: Tensor) -> Any:
        """A plan for all steps of one size; ``forward`` takes it while the step is captured.

        Args:
            block_table: int32 [slots, max_pages]; its contents change, too.
        """

    def before_replay(self, plan: Any, rows: np.ndarray) -> None:
        """Prepare on the host what the captured kernels of this plan need. Never waits for them.

        Called before the capture, and before each replay on the same stream.

        Args:
            rows: int32 [n, 3], as for ``plan``, without padding; n is 0 before a capture.
        """


class LogitRows(NamedTuple):
    """The tokens that yield logits: ints [samples].

    ``slots`` are their slots, ``lengths`` the lengths of their sequences up to and including them;
    0 is padding.
    """

    slots: Tensor
    lengths: Tensor


class HiddenStates:
    """Hidden states of all tokens in the midst of a model, for those who ask for them.

    Args:
        after: the counts of layers after which they are kept, rising. In a model that has fewer,
            it is after the last one.

    Attributes:
        kept: [tokens, hidden] after each of them, once the model has run.
    """

    def __init__(self, after: Sequence[int]):
        self._after = after
        self.kept: list[Tensor] = []

    def from_layer(self, number: int) -> bool:
        """Whether any are wanted that this layer, or a later one, makes."""
        return self._after[-1] > number

    def see(self, count: int, x: Tensor) -> None:
        """Keep a copy of x, which is after so many layers, if it is wanted."""
        if count in self._after:
            self.kept.append(x.clone())

    def end(self, x: Tensor) -> None:
        """Keep x, which is after the last layer, where later ones are wanted."""
        self.kept += [x] * (len(self._after) - len(self.kept))


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it.

    Attributes:
        input_ids: int64 [tokens].
        positions: int64 [tokens], each in its own sequence.
        slot_mapping: int64 [tokens]; index of each token's K and V in the flattened pages, -1 for
            padding.
        sample_rows: int64 [samples]; indices of the tokens that yield logits. None: all do.
        plan: the backend's, for this step.
        logit_rows: the tokens in ``sample_rows``, if the backend should attend only these where no
            others are needed.
        states: of recurrent layers; None in models without them.
        hidden: hidden states of all tokens that are wanted; None: none are.
        replays: takes what recurrent layers did, to do it again for some of the tokens; None: that
            is not wanted.
        logit_rows_only: no later layer writes K and V. This one writes those of all tokens, but
            computes everything after that only for tokens that yield logits.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor | None
    backend: AttentionBackend
    plan: Any
    logit_rows: LogitRows | None = None
    states: StepStates | None = None
    hidden: HiddenStates | None = None
    replays: list[Replay] | None = None
    logit_rows_only: bool = False

    def for_last_layer(self) -> Self:
        """This step with ``logit_rows_only`` set, if that leaves fewer tokens but not none."""
        if self.sample_rows is None or not 0 < len(self.sample_rows) < len(self.input_ids):
            return self
        return replace(self, logit_rows_only=True)

    def before_sharing_layers(self) -> Self:
        """As ``for_last_layer``, if layers follow that only read K and V, and this backend can
        attend single tokens in them."""
        can = self.logit_rows is not None and isinstance(self.backend, LogitRowsBackend)
        return self.for_last_layer() if can else self

    def of_logit_rows(self) -> Self:
        """The step of the tokens that yield logits alone, for layers after ``logit_rows_only``."""
        return replace(
            self,
            input_ids=self.sampling(self.input_ids),
            positions=self.sampling(self.positions),
            slot_mapping=self.sampling(self.slot_mapping),
            sample_rows=None,
        )

    def attend(self, spec: AttentionSpec, qkv: Tensor, encoding: HeadEncoding) -> Tensor:
        """See ``AttentionBackend.forward``; returns only the ``needed`` rows."""
        backend = self.backend
        if (
            self.logit_rows_only
            and self.logit_rows is not None
            and isinstance(backend, LogitRowsBackend)
        ):
            return backend.forward_logit_rows(qkv, spec, encoding, self)
        return self.needed(backend.forward(qkv, spec, encoding, self))

    def recur(self, layer: int, mix: Mix, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer over the step's rows, from their states on.

        Args:
            inputs: [tokens, ...] each; ``mix`` does not change them.
        """
        assert self.states is not None
        if self.replays is not None:
            self.replays.append(Replay(layer, mix, inputs))
        return mix(inputs, self.states.store.layer(layer), self.states.rows)

    def needed(self, x: Tensor) -> Tensor:
        """The rows of x, [tokens, size], that are needed after this layer's attention."""
        return self.sampling(x) if self.logit_rows_only else x

    def sampling(self, x: Tensor) -> Tensor:
        """The rows of x, [tokens, size], that yield logits."""
        return x if self.sample_rows is None else x.index_select(0, self.sample_rows)


#: Of a recurrent layer: from inputs, the layer's states and the rows that have them to a result.
Mix = Callable[[tuple[Tensor, ...], LayerState, StateRows], Tensor]


class Replay(NamedTuple):
    """What a recurrent layer did in a step; see ``ForwardBatch.recur``."""

    layer: int
    mix: Mix
    inputs: tuple[Tensor, ...]


class StateStore(Protocol):
    """The states of recurrent layers, as models see them."""

    def layer(self, index: int) -> LayerState:
        """Those of one layer."""


class StepStates(NamedTuple):
    """The states that a step reads and writes."""

    store: StateStore
    rows: StateRows


class KVPages(Protocol):
    """The paged K and V storage, as attention backends see it.

    Attributes:
        first_layer: the first one that has K and V.
    """

    page_size: int
    first_layer: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """[num_pages, page_size, num_kv_heads, head_dim] each: K and V of a layer with its own."""

    def scales(self, index: int) -> Tensor | None:
        """Those of such a layer, if its K and V are in 8 bits: see ``kernels.attention``."""
