"""SlotTable: what the device remembers of each running sequence between steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.kernels.tokens import enter_pages
from asyncllm.wire.messages import Admit, unpack


class Scoring(NamedTuple):
    """A prompt of so many tokens, of each of which so many likely alternatives are wanted."""

    num_prompt: int
    num_top: int


class SlotTable:
    """State by slot, so that a step names sequences by small numbers.

    There is one slot more than sequences can have; rows that pad a batch are in it.

    Attributes:
        dummy_slot: the one that no sequence has.
        block_table: int32 [slots, max_pages] on the device; a sequence's pages in order.
        last_token: int64 [slots] on the device; the token sampled last, which is the next decode
            row's input. It never has to reach the host for the next step to run.
        num_known: int64 [slots] on the host; how many tokens came with the admission.
        scoring: prompts of which logprobs are still wanted, by slot.
        pooling: the next position whose hidden state is wanted, by slot.
    """

    def __init__(self, num_slots: int, max_pages: int, device: Device):
        self.dummy_slot = num_slots
        # Kernels are compiled for rows that begin aligned, whatever the longest sequence is.
        columns = -(-max_pages // 16) * 16
        self.block_table = torch.zeros(
            num_slots + 1, columns, dtype=torch.int32, device=device.torch_device
        )
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device.torch_device)
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.scoring: dict[int, Scoring] = {}
        self.pooling: dict[int, int] = {}
        self._known: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * num_slots
        self._device = device

    def warm_up(self) -> None:
        """Launch what enters pages once, with one that nobody reads."""
        self.add_pages(np.array([[self.dummy_slot, 0, 0]], dtype=np.int32))

    def admit(self, admit: Admit) -> np.ndarray:
        """A sequence takes its slot; returns its known tokens, int32."""
        tokens = unpack(admit.tokens)
        self._known[admit.slot] = tokens
        self.num_known[admit.slot] = len(tokens)
        self.scoring.pop(admit.slot, None)
        self.pooling.pop(admit.slot, None)
        if admit.prompt_logprobs >= 0:
            self.scoring[admit.slot] = Scoring(admit.num_prompt, admit.prompt_logprobs)
        if admit.pool_from >= 0:
            self.pooling[admit.slot] = admit.pool_from
        return tokens

    def known(self, slot: int, start: int, length: int) -> np.ndarray:
        """Tokens start .. start+length-1 of those the sequence was admitted with."""
        return self._known[slot][start : start + length]

    def take_scoring(self, slot: int, start: int, end: int) -> Scoring | None:
        """What is wanted of a row's positions start .. end-1; asked once, as each is computed once.

        None when they have nothing of a prompt that is scored.
        """
        scoring = self.scoring.get(slot)
        if scoring is not None and end >= scoring.num_prompt:
            del self.scoring[slot]
        return scoring if scoring is not None and start < scoring.num_prompt else None

    def take_pooling(self, slot: int, end: int) -> int | None:
        """From which position on, up to a row's ``end``, hidden states are wanted; asked once.

        None when none of them is.
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
        """Enter int32 [m, 3] of (slot, index, page) into the block table.

        The upload of a step's rows comes after it, and waits for it: so attention may look pages up
        before the kernels before it have finished.
        """
        if len(new_pages):
            enter_pages(self._device.upload(new_pages), self.block_table)

    def relay(self, slots: Tensor, tokens: Tensor) -> None:
        """Keep sampled tokens (int64) for the next step's decode rows of these slots."""
        # A row without a valid token has none; its sequence ends, but its next row may be in
        # flight already and needs an id that exists.
        self.last_token.index_copy_(0, slots, tokens.clamp(min=0))
