"""Which drafted tokens were right: a row goes on as long as it samples what was drafted."""

from __future__ import annotations

from typing import Self

import numpy as np
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.wire.messages import NO_TOKEN


class Verification:
    """The rows of a step that verify drafts.

    A sample whose earlier samples in the row all equal the drafted tokens is what the sequence
    would have sampled without a draft, as its input was the same and its random number belongs to
    its position. The others are of inputs that never came to be.
    """

    def __init__(self, slots: np.ndarray, samples: np.ndarray, drafts: np.ndarray):
        """
        Args:
            slots: int64 [m].
            samples: int64 [m, k]; the samples of each row, the last one repeated.
            drafts: int64 [m, k]; the token drafted in place of each, NO_TOKEN for none.
        """
        self._slots = slots
        self._samples = samples
        self._drafts = drafts

    @classmethod
    def of(cls, step: StepRows) -> Self | None:
        """None if the step verifies nothing."""
        if step.drafts is None:
            return None
        places = step.places
        firsts = np.flatnonzero((places == 0) & (step.drafts != NO_TOKEN))
        ends = np.searchsorted(step.sampling, step.sampling[firsts], side="right")
        index = firsts[:, None] + np.arange(int(places.max()) + 1)
        return cls(
            step.slots[firsts],
            np.minimum(index, ends[:, None] - 1),
            np.where(index < ends[:, None], step.drafts.take(index, mode="clip"), NO_TOKEN),
        )

    def keep_last(
        self, tokens: Tensor, columns: np.ndarray | None, table: SlotTable, device: Device
    ) -> None:
        """Keep each row's last right token for its next row, without waiting for the device.

        Args:
            tokens: int64 [columns]. columns: that of each sample; None: the samples themselves.
        """
        index = self._samples if columns is None else columns[self._samples]
        host = np.concatenate([self._slots[:, None], index, self._drafts], axis=1)
        slots, where, drafts = device.upload(host).split([1, index.shape[1], index.shape[1]], dim=1)
        sampled = tokens[where]
        right = (sampled == drafts).long().cumprod(1).sum(1, keepdim=True)
        table.keep_last(slots.squeeze(1), sampled.gather(1, right).squeeze(1))

    def wrong(self, sampled: np.ndarray) -> np.ndarray:
        """The samples that come after a wrong draft, given the tokens of all: int64."""
        right = (sampled[self._samples] == self._drafts).cumprod(axis=1)
        follows = self._drafts[:, :-1] != NO_TOKEN
        wrong: np.ndarray = self._samples[:, 1:][follows & (right[:, :-1] == 0)]
        return wrong
