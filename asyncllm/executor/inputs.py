"""From a plan's rows to the model's input tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.slots import SlotTable


@dataclass(slots=True)
class StepInputs:
    """A step's tensors on the device, and which rows sample.

    Attributes:
        input_ids, positions: int64 [tokens] on the device.
        sample_rows: int64 [samples] on the device; the token indices that yield logits.
        sample_slots: the same samples' slots; int64 [samples] on the device.
        sampling: int64 [samples] on the host; the rows of the plan that sample.
        slots, lengths: int64 [samples] on the host; slot, and sequence length before the sample.
    """

    input_ids: Tensor
    positions: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sampling: np.ndarray
    slots: np.ndarray
    lengths: np.ndarray


def stage(rows: np.ndarray, table: SlotTable, device: Device) -> StepInputs:
    """Build the inputs of ``rows``, int32 [n, 3] of (slot, start, q_len).

    What the host knows of them crosses in one copy. Decode rows' ids are filled in on the device,
    from the tokens sampled there.
    """
    slots, starts, q_lens = rows.astype(np.int64).T
    ends = np.cumsum(q_lens)
    offsets = ends - q_lens
    known = table.num_known[slots]
    decoding = np.flatnonzero(starts >= known)
    sampling = np.flatnonzero(starts + q_lens >= known)
    num_tokens, num_decodes, num_samples = int(ends[-1]), len(decoding), len(sampling)

    packed = np.zeros(2 * num_tokens + 2 * num_decodes + 2 * num_samples, dtype=np.int64)
    parts = np.split(
        packed,
        np.cumsum([num_tokens, num_tokens, num_decodes, num_decodes, num_samples]),
    )
    ids, positions, decode_at, decode_slots, sample_rows, sample_slots = parts
    positions[:] = np.arange(num_tokens) + np.repeat(starts - offsets, q_lens)
    for row in np.flatnonzero(starts < known):
        start, offset, q_len = starts[row], offsets[row], q_lens[row]
        ids[offset : offset + q_len] = table.known(slots[row], start, q_len)
    decode_at[:] = offsets[decoding]
    decode_slots[:] = slots[decoding]
    sample_rows[:] = ends[sampling] - 1
    sample_slots[:] = slots[sampling]

    on_device = device.upload(packed).split([len(part) for part in parts])
    input_ids = on_device[0]
    if num_decodes:
        input_ids.index_copy_(0, on_device[2], table.last_token.index_select(0, on_device[3]))
    return StepInputs(
        input_ids=input_ids,
        positions=on_device[1],
        sample_rows=on_device[4],
        sample_slots=on_device[5],
        sampling=sampling,
        slots=sample_slots,
        lengths=(starts + q_lens)[sampling],
    )
