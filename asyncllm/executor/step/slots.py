"""SlotTable: the state of each running sequence that lives between steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.kernels.tokens import enter_pages, settle_input, verify_drafts
from asyncllm.wire.messages import Admit, unpack


class Scoring(NamedTuple):
    """A prompt to be scored: its length, and the likely alternatives wanted for each token."""

    num_prompt: int
    num_top: int


class SlotTable:
    """State by slot; steps name sequences by slot.

    There is one slot more than sequences can have, for rows that pad a batch.

    Attributes:
        dummy_slot: the slot of padding rows.
        block_table: int32 [slots + 1, max_pages] on the device; a sequence's pages in order.
        last_token: int64 [slots + 1] on the device; the last sampled token, the input of the next
            decode row. The next step can run before the host has seen it.
        next_position: int64 [slots + 1] on the device; where the next row of a slot starts. Only of
            slots whose last row verified a draft, or followed one before its result was known.
        drafted: int64 [slots + 1, k] on the device; guesses of what follows ``last_token``.
        num_known: int64 [slots] on the host; number of tokens that came with the admission.
        scoring: prompts that are still to be scored, by slot.
        pooling: the next position to be pooled, by slot.
    """

    def __init__(self, num_slots: int, max_pages: int, device: Device, max_drafts: int = 0):
        self.dummy_slot = num_slots
        # Kernels are compiled for aligned rows, whatever the longest sequence is.
        columns = -(-max_pages // 16) * 16
        self.block_table = torch.zeros(
            num_slots + 1, columns, dtype=torch.int32, device=device.torch_device
        )
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device.torch_device)
        self.next_position = torch.zeros_like(self.last_token)
        self.drafted = self.last_token.new_zeros(num_slots + 1, max(1, max_drafts))
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.scoring: dict[int, Scoring] = {}
        self.pooling: dict[int, int] = {}
        self._num_pages = np.zeros(num_slots + 1, dtype=np.int64)
        self._known: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * num_slots
        self._device = device

    def warm_up(self) -> None:
        """Load the kernels, with a slot that nobody reads."""
        self.add_pages(np.array([[self.dummy_slot, 0, 0]], dtype=np.int32))
        row = self._device.upload(np.array([[self.dummy_slot, 0, 0, 0]], dtype=np.int32))
        settle_input(row.clone(), row, self.next_position, self.drafted)
        self.verify(row.new_zeros(1, dtype=torch.int64), row)

    def admit(self, admit: Admit) -> np.ndarray:
        """A sequence takes its slot; returns its known tokens, int32."""
        tokens = unpack(admit.tokens)
        self._known[admit.slot] = tokens
        self._num_pages[admit.slot] = 0
        self.num_known[admit.slot] = len(tokens)
        self.scoring.pop(admit.slot, None)
        self.pooling.pop(admit.slot, None)
        if admit.prompt_logprobs >= 0:
            self.scoring[admit.slot] = Scoring(admit.num_prompt, admit.prompt_logprobs)
        if admit.pool_from >= 0:
            self.pooling[admit.slot] = admit.pool_from
        return tokens

    def known(self, slot: int, start: int, length: int) -> np.ndarray:
        """Tokens start .. start+length-1 of those that came with the admission."""
        return self._known[slot][start : start + length]

    def take_scoring(self, slot: int, start: int, end: int) -> Scoring | None:
        """The scoring of a row's positions start .. end-1, None if they are not scored.

        Call once for each position, in order.
        """
        scoring = self.scoring.get(slot)
        if scoring is not None and end >= scoring.num_prompt:
            del self.scoring[slot]
        return scoring if scoring is not None and start < scoring.num_prompt else None

    def take_pooling(self, slot: int, end: int) -> int | None:
        """The first position before ``end`` to be pooled, None if there is none.

        Call once for each row, in order.
        """
        first = self.pooling.get(slot)
        if first is None or end <= first:
            return None
        if end < self.num_known[slot]:
            self.pooling[slot] = end
        else:
            del self.pooling[slot]
        return first

    def add_pages(self, new_pages: np.ndarray) -> None:
        """Write int32 [m, 3] of (slot, index, page) to the block table.

        The upload of the step's rows comes later in the stream. So attention, which waits for that
        upload, may look up pages before its preceding kernels have finished.
        """
        if len(new_pages):
            np.maximum.at(self._num_pages, new_pages[:, 0], new_pages[:, 1] + 1)
            enter_pages(self._device.upload(new_pages), self.block_table)

    def num_pages(self, slots: np.ndarray) -> np.ndarray:
        """How many pages the sequences in these slots have."""
        counts: np.ndarray = self._num_pages[slots]
        return counts

    def keep_last(self, slots: Tensor, tokens: Tensor) -> None:
        """Keep sampled tokens (int64) for the next decode rows of these slots."""
        # A sequence without a valid token ends, but its next row may be in flight already and needs
        # an id that exists.
        self.last_token.index_copy_(0, slots, tokens.clamp(min=0))

    def settle(self, flat: Tensor, fixes: np.ndarray) -> None:
        """Correct a step's input; see ``kernels.tokens.settle_input``."""
        settle_input(flat, self._device.upload(fixes), self.next_position, self.drafted)

    def verify(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Take in what rows with drafts sampled; see ``kernels.tokens.verify_drafts``."""
        return verify_drafts(tokens, rows, self.last_token, self.next_position, self.drafted)

    def look_up(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``next_position`` and ``drafted`` of some slots, once the steps before are done.

        The only place where a launch waits for the device.
        """
        index = self._device.upload(slots.astype(np.int64))
        positions = self._device.download(self.next_position.index_select(0, index))
        drafted = self._device.download(self.drafted.index_select(0, index))
        self._device.event().synchronize()
        return positions, drafted
