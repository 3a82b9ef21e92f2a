"""Masks that change with every token: of bad words, grammars and reasoning.

Such a mask depends on the tokens so far, which the host has to know, while a step is launched
before the previous one is done. So the tokens of these rows are copied to the host as soon as they
are sampled. The next step launches its forward, waits for that copy, and fills its masks while the
device is busy with the forward; they arrive before its logits are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device, Event
from asyncllm.executor.sampling.token_constraint import Grammars, TokenConstraint
from asyncllm.kernels.scores import mask_width
from asyncllm.parallel.ranks import Ranks
from asyncllm.wire.messages import Constraints, RowParams

log = logging.getLogger(__name__)

NOTHING_LEFT = "what is asked of the output leaves no token to go on with"


class Filled(NamedTuple):
    """Masks for some slots.

    Attributes:
        masks: int32 [m, width], on the device.
        order: int64 [m]; the slot of ``masks[i]`` is ``slots[order[i]]``.
        failures: indices into ``slots`` where no token is allowed, and why.
    """

    masks: Tensor
    order: np.ndarray
    failures: dict[int, str]


class DynamicMasks(Protocol):
    """The dynamic constraints of all slots."""

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None:
        """Start a slot anew; ``generated`` are its tokens from before a preemption, int32."""

    def drop(self, slot: int) -> None:
        """The slot is without such a constraint now."""

    def fill(self, slots: np.ndarray, lengths: np.ndarray) -> Filled:
        """The masks for the next tokens; waits for the tokens sampled last.

        Args:
            slots, lengths: int64 [m] on the host, as for ``Sampler.sample``.
        """

    def track(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Read back the tokens sampled for slots just filled; int64 [m], on the device."""


def dynamic_masks(
    vocab_size: int, device: Device, grammars: Grammars[Any] | None, ranks: Ranks
) -> DynamicMasks:
    """For a rank: the first one computes the masks, and the others get them from it.

    Args:
        grammars: needed on rank 0 where a row's parameters have a grammar.
    """
    if ranks.rank > 0:
        return _ReceivedMasks(vocab_size, device, ranks)
    computed = _ComputedMasks(vocab_size, device, grammars)
    return computed if ranks.size == 1 else _SentMasks(computed, ranks)


class _ComputedMasks:
    """Masks from the tokens and their constraints, on the host."""

    def __init__(self, vocab_size: int, device: Device, grammars: Grammars[Any] | None) -> None:
        self._device = device
        self._grammars = grammars
        self._width = mask_width(vocab_size)
        all_tokens = np.arange(32 * self._width) < vocab_size
        self._all_tokens = np.packbits(all_tokens, bitorder="little").view("<i4")
        self._constraints: dict[int, TokenConstraint] = {}
        self._readback: _Readback | None = None

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None:
        # Tokens in flight belong to the slot's previous constraint, and do not reach this one.
        self._constraints[slot] = constraint = self._token_constraint(params)
        for token in generated.tolist():
            constraint.accept(token)

    def drop(self, slot: int) -> None:
        self._constraints.pop(slot, None)

    def fill(self, slots: np.ndarray, lengths: np.ndarray) -> Filled:
        self._accept_tokens()
        constraints = [self._constraints[slot] for slot in slots.tolist()]
        matchers = [constraint.mask_matcher for constraint in constraints]
        # Rows with a matcher first, as grammars fill consecutive rows.
        order = np.argsort([matcher is None for matcher in matchers], kind="stable")
        # Masks may be megabytes, so they are filled where they are copied from. The allocator keeps
        # pinned memory until the copy has run.
        on_device = self._device.torch_device
        shape, is_cuda = (len(slots), self._width), on_device.type == "cuda"
        host = torch.empty(shape, dtype=torch.int32, pin_memory=is_cuda)
        masks = host.numpy()
        active = [matcher for matcher in matchers if matcher is not None]
        if self._grammars is not None and active:
            self._grammars.fill(active, masks[: len(active)])
        failures = {}
        for mask, i, length in zip(masks, order.tolist(), lengths[order].tolist(), strict=True):
            if (error := constraints[i].narrow(mask, length)) is not None:
                failures[i] = error
        for i in order[~masks.any(axis=1)].tolist():
            failures.setdefault(i, NOTHING_LEFT)
        return Filled(host.to(on_device, non_blocking=True), order, failures)

    def track(self, slots: np.ndarray, tokens: Tensor) -> None:
        constraints = [self._constraints[slot] for slot in slots.tolist()]
        tokens_on_host = self._device.download(tokens)
        self._readback = _Readback(constraints, tokens_on_host, self._device.event())

    def _token_constraint(self, params: RowParams) -> TokenConstraint:
        constraints = params.constraints or Constraints()
        mask = constraints.mask
        fixed = np.frombuffer(mask, dtype="<i4") if mask else self._all_tokens
        matcher, error = None, None
        if constraints.grammar:
            try:
                if self._grammars is None:
                    raise RuntimeError("there are no grammars here")
                matcher = self._grammars.matcher(constraints.grammar)
            except Exception:  # fails this row only
                log.exception("a grammar that was accepted cannot be used")
                error = "the grammar cannot be used"
        token_bytes = None if self._grammars is None else self._grammars.token_bytes
        return TokenConstraint(params, fixed, matcher, error, token_bytes)

    def _accept_tokens(self) -> None:
        if self._readback is None:
            return
        constraints, tokens, copied = self._readback
        copied.synchronize()
        for constraint, token in zip(constraints, tokens.tolist(), strict=True):
            constraint.accept(token)
        self._readback = None


class _Readback(NamedTuple):
    """Tokens being copied to the host, int64 [m], and the constraints that they belong to."""

    constraints: Sequence[TokenConstraint]
    tokens: np.ndarray
    copied: Event


class _SentMasks:
    """The masks of rank 0, which sends them to the others."""

    def __init__(self, computed: _ComputedMasks, ranks: Ranks) -> None:
        self.admit = computed.admit
        self.drop = computed.drop
        self.track = computed.track
        self._fill = computed.fill
        self._ranks = ranks

    def fill(self, slots: np.ndarray, lengths: np.ndarray) -> Filled:
        masks, order, failures = self._fill(slots, lengths)
        # In the order of slots, which the other ranks know.
        masks = masks[torch.from_numpy(order.argsort()).to(masks.device)]
        self._ranks.broadcast(masks)
        return Filled(masks, np.arange(len(slots)), failures)


class _ReceivedMasks:
    """The masks of another rank, which gets them from rank 0."""

    def __init__(self, vocab_size: int, device: Device, ranks: Ranks) -> None:
        self._width = mask_width(vocab_size)
        self._device = device
        self._ranks = ranks

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None: ...
    def drop(self, slot: int) -> None: ...
    def fill(self, slots: np.ndarray, lengths: np.ndarray) -> Filled:
        shape = len(slots), self._width
        masks = torch.empty(shape, dtype=torch.int32, device=self._device.torch_device)
        self._ranks.broadcast(masks)
        return Filled(masks, np.arange(len(slots)), {})

    def track(self, slots: np.ndarray, tokens: Tensor) -> None: ...
