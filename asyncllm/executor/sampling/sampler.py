"""From logits to tokens: every slot's sampling parameters, and the order in which they act."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.sampling.constraints import BiasTable, MaskTable, is_followed, is_masked
from asyncllm.executor.sampling.logprobs import Logprobs
from asyncllm.executor.sampling.penalties import Penalties, PenaltyTable
from asyncllm.kernels.random_streams import stream_of
from asyncllm.kernels.sampling import RECORD, sample_tokens
from asyncllm.kernels.upload import upload_aligned
from asyncllm.wire.messages import Constraints, RowParams

if TYPE_CHECKING:
    from asyncllm.executor.device import Device
    from asyncllm.executor.sampling.token_constraint import Grammars

# What a slot needs beyond the likeliest token, as bits.
_DRAW, _FILTER, _LOGPROBS, _MASK, _BIAS, _PENALISE, _FOLLOW = (1 << i for i in range(7))
#: Those that change scores.
_CHANGE = _MASK | _BIAS | _PENALISE

_SMALLEST = float(np.finfo(np.float32).tiny)
_PENDING = np.dtype([("slot", "<i8"), ("record", RECORD)])
#: So many rows at a time have their scores changed, or their logprobs computed, in float32.
_GROUP = 32


class Level(IntEnum):
    """What the rows of a step need, each level including those before it."""

    GREEDY = 0
    DRAW = 1
    FILTER = 2
    #: Changed scores or logprobs: only ``Sampler.sample`` does these.
    EAGER = 3


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call of ``sample`` yields, on the device.

    Attributes:
        tokens: int64 [m]; BAD_TOKEN where the logits were not finite, and where no token may be.
        logprobs: of the rows that asked for them, if any did.
        failures: the rows where no token may be, and why.
    """

    tokens: Tensor
    logprobs: Logprobs | None
    failures: dict[int, str] = field(default_factory=dict)


class ScoreTable(Protocol):
    """Something that changes scores, by slot."""

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Changed scores of some rows of a batch.

        Args:
            logits: [m, vocab], any floating dtype; not modified.
            rows: int64 [r], which rows of the logits. slots: int64 [r], of each of them.

        Returns:
            float32 [r, vocab].
        """


class Sampler:
    """Samples the next tokens of the sequences in ``num_slots`` slots.

    What acts on a row's logits, in this order, which is Hugging Face's and vLLM's:

    1. biases of single tokens are added;
    2. penalties: repetition, then presence and frequency;
    3. tokens that may not be sampled become -inf: those that allowed ids, bad words or the grammar
       leave out, and the stop tokens until the sequence is long enough;
    4. the temperature divides;
    5. top-k, top-p of what that leaves, and min-p; then the draw.

    Logprobs are of the logits as the model made them.

    Parameters live on the device, by slot. What the host keeps of them decides what there is to
    compute, so nothing here waits for the device, except with bad words and grammars for the tokens
    of the step before. What a row yields depends on its own logits, parameters, tokens, seed and
    position alone, not on the rows beside it: batching, chunked prompts and preemption do not show
    in the text.

    Args:
        num_slots: slots are numbered 0 .. num_slots-1; the one after them, which is always greedy,
            is for rows that nobody reads.
        vocab_size: number of logits of a row.
        device: where logits are and tokens go.
        grammars: for rows that have one; without it they fail.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: Device,
        grammars: Grammars[Any] | None = None,
    ) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        # Of RECORD.
        self._table = torch.zeros(num_slots + 1, 3, dtype=torch.int64, device=device.torch_device)
        # Records of slots, as yet with seeds for streams.
        self._pending: dict[int, tuple[float, ...]] = {}
        self._needs = np.zeros(num_slots + 1, dtype=np.int64)
        self._min_length = np.zeros(num_slots + 1, dtype=np.int64)
        self._stop_ids = [np.empty(0, dtype=np.int64)] * (num_slots + 1)
        self._num_logprobs = np.zeros(num_slots + 1, dtype=np.int64)
        # Large and rarely needed: made when first asked for.
        self._penalties: PenaltyTable | None = None
        self._biases: BiasTable | None = None
        self._masks: MaskTable | None = None
        self._grammars = grammars
        self._all_rows = torch.arange(_GROUP, device=self._device.torch_device)

    def admit(self, slot: int, params: RowParams, tokens: np.ndarray, num_prompt: int) -> None:
        """A sequence takes a slot; the device is told at the next ``flush``.

        Args:
            tokens: int32 [n], all of the sequence that is known; the first ``num_prompt`` are the
                prompt, the others were generated before it was preempted.
        """
        needs = _needs(params, self._vocab_size)
        stop_ids = np.array(params.stop_ids, dtype=np.int64)
        self._needs[slot] = needs
        # With a grammar they are banned by the mask, and only where it allows for something else.
        asked = params.constraints or Constraints()
        self._min_length[slot] = params.min_length if params.stop_ids and not asked.grammar else 0
        self._stop_ids[slot] = stop_ids[stop_ids < self._vocab_size]
        self._num_logprobs[slot] = params.logprobs
        self._pending[slot] = (
            params.seed,
            max(params.temperature, _SMALLEST) if needs & _DRAW else 0.0,
            params.top_p,
            params.min_p,
            params.top_k if 0 < params.top_k < self._vocab_size else 0,
        )
        sizes = self._num_slots, self._vocab_size
        if needs & _MASK:
            self._masks = self._masks or MaskTable(*sizes, self._device, self._grammars)
            self._masks.admit(slot, params, tokens[num_prompt:])
        if needs & _BIAS:
            self._biases = self._biases or BiasTable(*sizes, self._device.torch_device)
            self._biases.admit(slot, params)
        if needs & _PENALISE:
            self._penalties = self._penalties or PenaltyTable(*sizes, self._device.torch_device)
            penalties = Penalties(
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            )
            self._penalties.admit(slot, penalties, tokens[:num_prompt], tokens[num_prompt:])

    def flush(self) -> None:
        """Send the parameters of all admitted sequences to the device; ``draw`` relies on it."""
        if not self._pending:
            return
        packed = np.array(list(self._pending.items()), dtype=_PENDING)
        self._pending.clear()
        seeds = packed["record"]["stream"]
        # Not as a tensor: each call into PyTorch gives up the interpreter's lock, and then waits
        # for whoever has it.
        seeds[:] = stream_of(seeds)
        rows = self._device.upload(packed.view(np.int64).reshape(-1, 4))
        self._table.index_copy_(0, rows[:, 0], rows[:, 1:])

    def warm_up(self, dtype: torch.dtype) -> None:
        """Draw at every level as ``sample`` does: from logits of this type, and changed scores."""
        where = np.array([self._num_slots]), np.array([0])
        for kind, integers in ((dtype, np.int32), (torch.float32, np.int64)):
            slots, positions = upload_aligned(where, integers, self._device.upload)
            logits = torch.zeros(1, self._vocab_size, dtype=kind, device=slots.device)
            for level in (Level.GREEDY, Level.DRAW, Level.FILTER):
                self.draw(logits, slots, positions, level)

    def level(self, slots: np.ndarray, lengths: np.ndarray) -> Level:
        """The cheapest level that serves all these rows.

        Args:
            slots, lengths: int64 [m] on the host, as for ``sample``.
        """
        needs = self._needs[slots]
        if (needs & (_CHANGE | _LOGPROBS)).any() or self._banning(slots, lengths).any():
            return Level.EAGER
        return _draw_level(needs)

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        level: Level,
        relay: Tensor | None = None,
    ) -> Tensor:
        """Sample from logits as they are; on a GPU, this can be captured in a graph.

        Parameters are those of the last ``flush`` before it runs.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots: int [m]. positions: int [m], how many tokens the sequence has.
            level: at least that of the rows, and not EAGER.
            relay: int64 [num_slots + 1]; if given, each row's token is also written there by slot,
                0 where it has none.

        Returns:
            int64 [m]; BAD_TOKEN where the logits were not finite.
        """
        return sample_tokens(
            logits,
            self._table,
            slots,
            positions,
            draws=level >= Level.DRAW,
            filters=level >= Level.FILTER,
            relay=relay,
        )

    def sample(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Sampled:
        """Sample one token for each row, whatever it needs.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots: int64 [m] on the host, no slot twice.
            lengths: int64 [m] on the host; how many tokens the sequence has, which is the position
                of the new one.
        """
        self.flush()
        needs = self._needs[slots]
        changes = needs & _CHANGE
        changed = (changes != 0) | self._banning(slots, lengths)
        if changed.all():
            tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        else:
            slots_there, positions = upload_aligned((slots, lengths), np.int32, self._device.upload)
            tokens = self.draw(logits, slots_there, positions, _draw_level(needs[~changed]))
        followed = np.flatnonzero(needs & _FOLLOW)
        failures = self._refresh_masks(followed, slots, lengths) if len(followed) else {}
        for rows in _groups(changed, changes):
            self._sample_changed(logits, tokens, rows, slots[rows], lengths[rows])
        if len(followed) and self._masks is not None:
            sampled = tokens.index_select(0, self._device.upload(followed))
            self._masks.follow(slots[followed], sampled)
        asking = np.flatnonzero(needs & _LOGPROBS)
        if len(asking) == 0:
            return Sampled(tokens, None, failures)
        wanted = self._num_logprobs[slots[asking]]
        return Sampled(tokens, Logprobs(logits, tokens, asking, wanted, self._device), failures)

    def _refresh_masks(
        self, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray
    ) -> dict[int, str]:
        """Bring those of these rows up to date; returns rows where no token may be, and why."""
        assert self._masks is not None, "made when the first such row was admitted"
        failures = self._masks.refresh(slots[rows], lengths[rows])
        return {int(rows[at]): reason for at, reason in failures.items()}

    def _sample_changed(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Sample these rows of a batch, whose scores change alike, into its ``tokens``."""
        index, slots_there, positions = upload_aligned(
            (rows, slots, lengths), np.int64, self._device.upload
        )
        needs = self._needs[slots]
        scores = self._scores(logits, index, slots_there, int(needs[0]))
        banned = self._banning(slots, lengths)
        if banned.any():
            self._ban_stop_ids(scores, np.flatnonzero(banned), slots[banned])
        sampled = self.draw(scores, slots_there, positions, _draw_level(needs))
        if needs[0] & _PENALISE and self._penalties is not None:
            self._penalties.add(slots_there, sampled)
        tokens.index_copy_(0, index, sampled)

    def _scores(self, logits: Tensor, rows: Tensor, slots: Tensor, needs: int) -> Tensor:
        """Scores of some rows of a batch, float32, after the changes that all of them need."""
        tables: tuple[tuple[int, ScoreTable | None], ...] = (
            (_BIAS, self._biases),
            (_PENALISE, self._penalties),
            (_MASK, self._masks),
        )
        scores = logits
        for need, table in tables:
            if needs & need and table is not None:
                scores = table.scores(scores, rows, slots)
                rows = self._all_rows[: len(rows)]
        return logits.index_select(0, rows).float() if scores is logits else scores

    def _banning(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Which rows may not stop yet; bool [m]."""
        banning: np.ndarray = lengths < self._min_length[slots]
        return banning

    def _ban_stop_ids(self, scores: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Set the scores of these rows' stop tokens to -inf, in place."""
        ids = [self._stop_ids[slot] for slot in slots]
        where = rows.repeat([i.size for i in ids]) * self._vocab_size + np.concatenate(ids)
        # Added, not assigned: NaN stays NaN and so is noticed.
        minus_inf = scores.new_full((len(where),), -torch.inf)
        scores.view(-1).index_add_(0, self._device.upload(where), minus_inf)


def _needs(params: RowParams, vocab_size: int) -> int:
    """The bits of what these parameters need."""
    needs = 0
    # Of the likeliest token alone nothing is drawn.
    if params.temperature > 0 and params.top_k != 1:
        needs |= _DRAW
        if 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0:
            needs |= _FILTER
    asked = params.constraints or Constraints()
    if is_masked(asked):
        needs |= _MASK | (_FOLLOW if is_followed(asked) else 0)
    if asked.bias_ids:
        needs |= _BIAS
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        needs |= _PENALISE
    if params.logprobs >= 0:
        needs |= _LOGPROBS
    return needs


def _draw_level(needs: np.ndarray) -> Level:
    """What ``draw`` has to do for rows with these needs."""
    some = int(np.bitwise_or.reduce(needs))
    if some & _FILTER:
        return Level.FILTER
    return Level.DRAW if some & _DRAW else Level.GREEDY


def _groups(which: np.ndarray, kinds: np.ndarray) -> list[np.ndarray]:
    """The rows where ``which`` is true, a bounded number of one kind at a time."""
    groups = []
    for kind in np.unique(kinds[which]):
        rows = np.flatnonzero(which & (kinds == kind))
        groups += [rows[start : start + _GROUP] for start in range(0, len(rows), _GROUP)]
    return groups
