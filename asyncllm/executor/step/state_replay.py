"""States of rows that verify drafts: only what is right may stay in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.step.drafter import Taken
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.types.recurrent import StateRows
from asyncllm.kernels.upload import upload_aligned


class StateReplay:
    """Lets rows that verify drafts run on copies of their states.

    Which tokens are right is known after the step. Then the recurrent layers go over these again,
    from the same inputs, on the states themselves. This reads no weights but those of convolutions.
    """

    def __init__(self, pool: StatePool, table: SlotTable, device: Device):
        self._pool = pool
        self._table = table
        self._device = device

    def set_apart(self, step: StepRows) -> StepRows:
        """The step with its drafts on copies of the states, which are made here."""
        rows = self._rows(step)
        if len(rows) == 0:
            return step
        slots = step.state_slots.copy()
        slots[rows] = self._pool.first_scratch + np.arange(len(rows))
        copies = np.stack([step.state_slots[rows], slots[rows]], axis=1)
        self._pool.copy(copies.astype(np.int32), self._device.upload)
        return replace(step, state_slots=slots)

    def replay(self, step: StepRows, taken: Taken, verified: np.ndarray, right: Tensor) -> None:
        """Bring the states to where each row got to.

        Args:
            step: before ``set_apart``.
            verified: int64 [m]; the rows that ``right`` is of: how many drafted tokens were right.
        """
        rows = self._rows(step)
        if len(rows) == 0:
            return
        slots, _, q_lens = step.rows[rows].T
        firsts = step.rows[:, 2].cumsum()[rows] - q_lens
        parts = step.state_slots[rows], slots, firsts, np.flatnonzero(np.isin(verified, rows))
        of_state, of_slot, first, which = upload_aligned(parts, np.int32, self._device.upload)
        counts = right[which.long()].long() + 1
        offsets = F.pad(counts.cumsum(0), (1, 0))
        starts = self._table.next_position[of_slot.long()] - counts
        # Tokens of no row come after those of the last.
        tokens = torch.arange(int(q_lens.sum()), device=counts.device)
        row = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True)
        row = row.clamp(max=len(rows) - 1)
        index = first.long()[row] + torch.minimum(tokens - offsets[row], counts[row] - 1)
        of_rows = StateRows(of_state, starts.int(), offsets.int(), False)
        for layer, mix, inputs in taken.replays:
            chosen = tuple(part.index_select(0, index) for part in inputs)
            mix(chosen, self._pool.layer(layer), of_rows)

    def _rows(self, step: StepRows) -> np.ndarray:
        """The rows with drafts, if they have states: int64 [n]."""
        if step.drafts is None or not self._pool.num_scratch:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(np.bincount(step.sampling, minlength=len(step.rows)) > 1)
