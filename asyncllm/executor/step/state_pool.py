"""The memory of recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import StepStates
from asyncllm.kernels.recurrent.states import copy_states
from asyncllm.kernels.types.recurrent import LayerState, StateRows
from asyncllm.kernels.upload import Upload, upload_aligned
from asyncllm.models.state import StateShape


class StatePool:
    """The state of every recurrent layer, by state slot.

    Only the scheduler knows which slots are free. Slot 0 is nobody's: rows that pad a step read and
    write it. A slot keeps what its last owner wrote; a row that starts at position 0 ignores it.

    A slot's states of all layers are side by side, so that one copy moves them.

    Args:
        states: of each recurrent layer; none in models without such layers.
        num_slots: besides slot 0.
        num_scratch: slots after these, for rows that verify drafts.
        dtype: of the convolutions' inputs.

    Attributes:
        num_scratch: as given; 0 in models without recurrent layers.
        first_scratch: the first of these slots.
        inputs: [slots + 1, elements of all layers' inputs].
        matrices: [slots + 1, elements of all layers' matrices], in the shapes' dtype.
    """

    def __init__(
        self,
        states: Mapping[int, StateShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_scratch: int = 0,
    ) -> None:
        self.num_scratch = num_scratch if states else 0
        self.first_scratch = num_slots + 1
        count = num_slots + 1 + num_scratch if states else 0
        shapes = states.values()
        sizes = [shape.num_inputs for shape in shapes], [shape.num_elements for shape in shapes]
        self.inputs = torch.zeros(count, sum(sizes[0]), dtype=dtype, device=device)
        of_matrices = next((getattr(torch, shape.dtype) for shape in shapes), torch.float32)
        self.matrices = torch.zeros(count, sum(sizes[1]), dtype=of_matrices, device=device)
        starts = (accumulate(part, initial=0) for part in sizes)
        self._layers = {
            layer: self._layer(shape, *start)
            for (layer, shape), *start in zip(states.items(), *starts, strict=False)
        }

    def _layer(self, shape: StateShape, first_input: int, first_element: int) -> LayerState:
        inputs = self.inputs.narrow(1, first_input, shape.num_inputs)
        inputs = inputs.unflatten(1, (shape.width, shape.channels))
        if not shape.heads:
            return LayerState(inputs, None)
        matrices = self.matrices.narrow(1, first_element, shape.num_elements)
        return LayerState(inputs, matrices.unflatten(1, (shape.heads, shape.keys, shape.values)))

    def layer(self, index: int) -> LayerState:
        """See ``StateStore``."""
        return self._layers[index]

    def copy(self, copies: np.ndarray, upload: Upload) -> None:
        """Copy states, in order with the steps: int32 [k, 2] of (source, destination) slots."""
        if len(copies):
            copy_states(self.inputs, self.matrices, upload(copies.copy()))

    def warm_up(self, upload: Upload) -> None:
        """Compile what ``copy`` launches."""
        if self._layers:
            self.copy(np.zeros((1, 2), dtype=np.int32), upload)

    def bytes_of(self, slot: int) -> tuple[Tensor, Tensor]:
        """All bytes of a slot, in two parts; uint8 [bytes] each."""
        return self.inputs[slot].view(torch.uint8), self.matrices[slot].view(torch.uint8)

    def of_step(self, rows: np.ndarray, slots: np.ndarray, upload: Upload) -> StepStates | None:
        """What the layers need of a step; None in models without recurrent layers.

        Args:
            rows: int [n, 3] of (slot, start, q_len), n > 0.
            slots: int [n]; the rows' state slots.
        """
        if not self._layers:
            return None
        _, starts, q_lens = rows.T
        parts = slots, starts, np.concatenate([[0], q_lens.cumsum()])
        of_slots, of_starts, offsets = upload_aligned(parts, np.int32, upload)
        one_token = bool((q_lens == 1).all())
        return StepStates(self, StateRows(of_slots, of_starts, offsets, one_token))

    def of_slots(self, slots: Tensor, starts: Tensor, offsets: Tensor | None) -> StepStates | None:
        """As ``of_step``, for a captured step.

        Args:
            slots, starts: int32 [rows].
            offsets: int32 [rows + 1]; None: row i has token i.
        """
        if not self._layers:
            return None
        one_token = offsets is None
        if offsets is None:
            offsets = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        return StepStates(self, StateRows(slots, starts, offsets, one_token))
