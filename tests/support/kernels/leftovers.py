"""What earlier sequences left in the slots of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncllm.kernels.types.recurrent import LayerState


def leave_behind(state: LayerState, starts: Sequence[int]) -> None:
    """NaN, from earlier owners of the slots, where a row has written nothing yet; in slots from 0.

    Slot 0 is that of padding.
    """
    assert state.matrices is not None
    for slot, start in enumerate(starts):
        state.inputs[slot, start:] = torch.nan
        if start == 0:
            state.matrices[slot] = torch.nan
