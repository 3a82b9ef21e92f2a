"""Which drafted tokens were right: a row goes on as long as it samples what was drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.wire.messages import NO_TOKEN


@dataclass(frozen=True, slots=True)
class Verification:
    """The rows of a step that verify drafts, or follow such a row whose result is not known yet.

    A sample whose earlier samples in the row all equal the drafted tokens is what the sequence
    would have sampled without a draft, as its input was the same and its random number belongs to
    its position. The others are of inputs that never came to be.

    Attributes:
        rows: int64 [m]; their indices.
        firsts: int64 [m]; the first sample of each.
        fixed: int32 [m, 3]; slot, promised start, and how many positions earlier it may start.
        drafts: int32 [m, k]; the token drafted in place of each sample, NO_TOKEN for none.
    """

    rows: np.ndarray
    firsts: np.ndarray
    fixed: np.ndarray
    drafts: np.ndarray

    @classmethod
    def of(cls, step: StepRows) -> Self | None:
        """None if the host knows all that this would find out."""
        if step.drafts is None and step.most_behind is None:
            return None
        concerned = np.zeros(len(step.rows), dtype=bool)
        behind = np.zeros(len(step.rows), dtype=np.int64)
        if step.most_behind is not None:
            behind = step.most_behind
            concerned |= behind > 0
        places = step.places
        drafts = np.full((len(step.rows), int(places.max(initial=0))), NO_TOKEN, dtype=np.int32)
        if step.drafts is not None:
            drafted = np.flatnonzero(step.drafts != NO_TOKEN)
            concerned[step.sampling[drafted]] = True
            drafts[step.sampling[drafted], places[drafted]] = step.drafts[drafted]
        rows = np.flatnonzero(concerned)
        fixed = np.stack([*step.rows[rows, :2].T, behind[rows]], axis=1).astype(np.int32)
        return cls(rows, np.searchsorted(step.sampling, rows), fixed, drafts[rows])

    def check(
        self, tokens: Tensor, columns: np.ndarray | None, table: SlotTable, device: Device
    ) -> Tensor:
        """Keep where each sequence got to for its next row, without waiting for the device.

        Args:
            tokens: int64 [columns]. columns: that of each sample; None: the samples themselves.

        Returns:
            int32 [m]; how many drafted tokens of each row were right.
        """
        firsts = self.firsts if columns is None else columns[self.firsts]
        rows = np.concatenate([self.fixed, firsts[:, None], self.drafts], axis=1, dtype=np.int32)
        return table.verify(tokens, device.upload(rows))

    def wrong(self, step: StepRows, right: np.ndarray) -> np.ndarray:
        """The samples that come after a wrong draft, given what ``check`` found: int64."""
        most = np.full(len(step.rows), np.iinfo(np.int64).max)
        most[self.rows] = right
        return np.flatnonzero(step.places > most[step.sampling])
