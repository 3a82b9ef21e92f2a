"""Constraints: what each slot's sequence may sample, as masks on the device.

What never changes is written once. What depends on the tokens so far (bad words of several tokens,
grammars) is known to the host, and a step is launched while the one before it still runs. So the
tokens of such rows are copied to the host as soon as they are sampled. The next step's forward is
launched first; then its masks wait for that copy, are filled while the device is busy with the
forward, and are there before its logits are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.sampling.token_constraint import Grammars, Restriction
from asyncllm.kernels.masks import mask_scores, mask_width
from asyncllm.kernels.upload import upload
from asyncllm.types import MAX_LOGIT_BIAS
from asyncllm.wire.messages import Constraints, RowParams, unpack

if TYPE_CHECKING:
    from asyncllm.executor.device import Device, Mark

log = logging.getLogger(__name__)

NOTHING_LEFT = "what is asked of the output leaves no token to go on with"


class MaskTable:
    """Masks by slot: fixed ones, and those of followed slots, which change with every token.

    Args:
        grammars: needed where a row's parameters have a grammar.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: Device,
        grammars: Grammars[Any] | None = None,
    ) -> None:
        self._device = device
        self._grammars = grammars
        shape = num_slots, mask_width(vocab_size)
        self._masks = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)
        # Of all tokens there are.
        every = np.arange(32 * shape[1]) < vocab_size
        self._whole = np.packbits(every, bitorder="little").view("<i4")
        self._followed: dict[int, Restriction] = {}
        self._landing: _Landing | None = None

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None:
        """Start a slot anew; what was generated before a preemption, int32, counts."""
        asked = params.constraints or Constraints()
        fixed = np.frombuffer(asked.mask, dtype="<i4") if asked.mask else self._whole
        if not is_followed(asked):
            self._followed.pop(slot, None)
            # Not one of the device's few buffers for steps: any number of slots may start at once.
            mask = upload(fixed.copy(), self._masks.device)  # torch wants it writable
            self._masks[slot].copy_(mask)
            return
        # What is landing belongs to the restriction before, and does not reach this one.
        self._followed[slot] = restriction = self._restriction(params, fixed)
        for token in generated.tolist():
            restriction.accept(token)

    def refresh(self, slots: np.ndarray, lengths: np.ndarray) -> dict[int, str]:
        """Bring the masks of followed slots up to date; waits for the tokens sampled last.

        Args:
            slots, lengths: int64 [m] on the host, as for ``Sampler.sample``.

        Returns:
            Where in ``slots`` nothing is allowed, and why.
        """
        self._take_in()
        followed = [self._followed[slot] for slot in slots.tolist()]
        matching = [each.matching for each in followed]
        order = np.argsort([matcher is None for matcher in matching], kind="stable")
        host = self._host_masks(len(slots))
        masks = host.numpy()
        matchers = [matcher for matcher in matching if matcher is not None]
        if self._grammars is not None and matchers:
            self._grammars.fill(matchers, masks[: len(matchers)])
        failures = {}
        for mask, i, length in zip(masks, order.tolist(), lengths[order].tolist(), strict=True):
            if (error := followed[i].narrow(mask, length)) is not None:
                failures[i] = error
        for i in order[~masks.any(axis=1)].tolist():
            failures.setdefault(i, NOTHING_LEFT)
        where = self._device.upload(slots[order])
        self._masks.index_copy_(0, where, host.to(where.device, non_blocking=True))
        return failures

    def follow(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Tokens were sampled for followed slots, just ``refresh``-ed; int64 [m] on the device."""
        followed = [self._followed[slot] for slot in slots.tolist()]
        self._landing = _Landing(followed, self._device.download(tokens), self._device.mark())

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Scores of some rows of a batch after their masks; see ``ScoreTable``."""
        return mask_scores(logits, rows, slots, self._masks)

    def _restriction(self, params: RowParams, fixed: np.ndarray) -> Restriction:
        matcher, error = None, None
        if params.constraints is not None and params.constraints.grammar:
            try:
                if self._grammars is None:
                    raise RuntimeError("there are no grammars here")
                matcher = self._grammars.matcher(params.constraints.grammar)
            except Exception:  # whatever it is, it is this row's alone
                log.exception("a grammar that was accepted cannot be used")
                error = "the grammar cannot be used"
        bytes_of = None if self._grammars is None else self._grammars.token_bytes
        return Restriction(params, fixed, matcher, error, bytes_of)

    def _take_in(self) -> None:
        if self._landing is None:
            return
        followed, tokens, copied = self._landing
        copied.wait()
        for restriction, token in zip(followed, tokens.tolist(), strict=True):
            restriction.accept(token)
        self._landing = None

    def _host_masks(self, count: int) -> Tensor:
        """Memory for so many masks; its allocator keeps it from others until it is copied.

        They are written where they are copied from: they may be megabytes.
        """
        shape = count, self._masks.shape[1]
        return torch.empty(shape, dtype=torch.int32, pin_memory=self._masks.is_cuda)


class _Landing(NamedTuple):
    """Tokens on their way to the host, int64 [m], and whom they belong to."""

    followed: Sequence[Restriction]
    tokens: np.ndarray
    copied: Mark


class BiasTable:
    """What is added to the logits of single tokens, by slot, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots, MAX_LOGIT_BIAS
        self._vocab_size = vocab_size
        self._device = device
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._biases = torch.zeros(shape, device=device)
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, params: RowParams) -> None:
        """Start a slot anew; ids that have no logit are ignored."""
        asked = params.constraints or Constraints()
        ids, biases = unpack(asked.bias_ids), np.frombuffer(asked.biases, dtype="<f4")
        exist = ids < self._vocab_size
        count = self._counts[slot] = np.count_nonzero(exist)
        packed = np.stack([ids[exist], biases[exist].view(np.int32)])
        there = upload(packed, self._device)
        self._ids[slot].zero_()[:count].copy_(there[0])
        self._biases[slot].zero_()[:count].copy_(there[1].view(torch.float32))

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Scores of some rows of a batch with their biases added; see ``ScoreTable``."""
        scores = logits.index_select(0, rows).float()
        # A slot with fewer than the most has zeros for token 0.
        most = int(self._counts.max())
        ids, biases = self._ids[:, :most], self._biases[:, :most]
        return scores.scatter_add_(1, ids.index_select(0, slots), biases.index_select(0, slots))


def is_masked(constraints: Constraints) -> bool:
    """Whether some tokens are left out at some time."""
    return bool(constraints.mask) or is_followed(constraints)


def is_followed(constraints: Constraints) -> bool:
    """Whether which ones depends on the tokens before."""
    return bool(constraints.grammar or constraints.bad_words or constraints.reasoning)
