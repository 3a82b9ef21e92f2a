"""Constraints on each slot's next token, as masks and biases on the device.

A fixed mask is written once. A dynamic one (bad words of several tokens, grammars, reasoning)
depends on the tokens so far, which the host has to know, while a step is launched before the
previous one is done. So the tokens of such rows are copied to the host as soon as they are sampled.
The next step launches its forward, waits for that copy, and fills its masks while the device is
busy with the forward; they arrive before its logits are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.sampling.token_constraint import Grammars, TokenConstraint
from asyncllm.kernels.masks import mask_scores, mask_width
from asyncllm.kernels.upload import upload
from asyncllm.types import MAX_LOGIT_BIAS
from asyncllm.wire.messages import Constraints, RowParams, unpack

if TYPE_CHECKING:
    from asyncllm.executor.device import Device, Event

log = logging.getLogger(__name__)

NOTHING_LEFT = "what is asked of the output leaves no token to go on with"


class MaskTable:
    """Masks by slot: fixed ones, and dynamic ones, which change with every token.

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
        all_tokens = np.arange(32 * shape[1]) < vocab_size
        self._all_tokens = np.packbits(all_tokens, bitorder="little").view("<i4")
        self._dynamic: dict[int, TokenConstraint] = {}
        self._readback: _Readback | None = None

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None:
        """Start a slot anew; ``generated`` are its tokens from before a preemption, int32."""
        constraints = params.constraints or Constraints()
        mask = constraints.mask
        fixed = np.frombuffer(mask, dtype="<i4") if mask else self._all_tokens
        if not is_dynamic(constraints):
            self._dynamic.pop(slot, None)
            # Not through the device's ring of buffers, as any number of slots may start at once.
            writable = fixed.copy()  # for torch
            self._masks[slot].copy_(upload(writable, self._masks.device))
            return
        # Tokens in flight belong to the slot's previous constraint, and do not reach this one.
        self._dynamic[slot] = constraint = self._token_constraint(params, fixed)
        for token in generated.tolist():
            constraint.accept(token)

    def refresh(self, slots: np.ndarray, lengths: np.ndarray) -> dict[int, str]:
        """Update the masks of dynamic slots; waits for the tokens sampled last.

        Args:
            slots, lengths: int64 [m] on the host, as for ``Sampler.sample``.

        Returns:
            Indices into ``slots`` where no token is allowed, and why.
        """
        self._accept_tokens()
        constraints = [self._dynamic[slot] for slot in slots.tolist()]
        matchers = [constraint.mask_matcher for constraint in constraints]
        # Rows with a matcher first, as grammars fill consecutive rows.
        order = np.argsort([matcher is None for matcher in matchers], kind="stable")
        # Masks may be megabytes, so they are filled where they are copied from. The allocator keeps
        # pinned memory until the copy has run.
        shape = len(slots), self._masks.shape[1]
        host = torch.empty(shape, dtype=torch.int32, pin_memory=self._masks.is_cuda)
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
        on_device = self._device.upload(slots[order])
        self._masks.index_copy_(0, on_device, host.to(on_device.device, non_blocking=True))
        return failures

    def track(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Read back the tokens sampled for dynamic slots just refreshed; int64 [m], on device."""
        constraints = [self._dynamic[slot] for slot in slots.tolist()]
        tokens_on_host = self._device.download(tokens)
        self._readback = _Readback(constraints, tokens_on_host, self._device.event())

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Masked scores of some rows of a batch; see ``ScoreTable``."""
        return mask_scores(logits, rows, slots, self._masks)

    def _token_constraint(self, params: RowParams, fixed: np.ndarray) -> TokenConstraint:
        matcher, error = None, None
        if params.constraints is not None and params.constraints.grammar:
            try:
                if self._grammars is None:
                    raise RuntimeError("there are no grammars here")
                matcher = self._grammars.matcher(params.constraints.grammar)
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


class BiasTable:
    """Logit biases by slot, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots, MAX_LOGIT_BIAS
        self._vocab_size = vocab_size
        self._device = device
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._biases = torch.zeros(shape, device=device)
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, params: RowParams) -> None:
        """Start a slot anew; ids beyond the vocabulary are ignored."""
        constraints = params.constraints or Constraints()
        ids = unpack(constraints.bias_ids)
        biases = np.frombuffer(constraints.biases, dtype="<f4")
        exist = ids < self._vocab_size
        count = self._counts[slot] = np.count_nonzero(exist)
        packed = np.stack([ids[exist], biases[exist].view(np.int32)])
        on_device = upload(packed, self._device)
        self._ids[slot].zero_()[:count].copy_(on_device[0])
        self._biases[slot].zero_()[:count].copy_(on_device[1].view(torch.float32))

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Biased scores of some rows of a batch; see ``ScoreTable``."""
        scores = logits.index_select(0, rows).float()
        # A slot with fewer biases than another adds zeros to token 0.
        most = int(self._counts.max())
        ids, biases = self._ids[:, :most], self._biases[:, :most]
        return scores.scatter_add_(1, ids.index_select(0, slots), biases.index_select(0, slots))


def is_masked(constraints: Constraints) -> bool:
    """Whether some tokens are masked at some time."""
    return bool(constraints.mask) or is_dynamic(constraints)


def is_dynamic(constraints: Constraints) -> bool:
    """Whether the mask depends on the previous tokens."""
    return bool(constraints.grammar or constraints.bad_words or constraints.reasoning)
