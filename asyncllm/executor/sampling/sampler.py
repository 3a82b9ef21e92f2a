"""From logits to tokens: every slot's sampling parameters, and the order in which they act."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.sampling.constraints import BiasTable, MaskTable
from asyncllm.executor.sampling.dynamic_masks import dynamic_masks
from asyncllm.executor.sampling.logprobs import Logprobs
from asyncllm.executor.sampling.needs import Level, Need, draw_level, needs_of
from asyncllm.executor.sampling.penalties import Penalties, PenaltyTable
from asyncllm.executor.sampling.token_constraint import Grammars
from asyncllm.kernels.random_streams import stream_of
from asyncllm.kernels.sampling import RECORD, sample_tokens
from asyncllm.kernels.upload import upload_aligned
from asyncllm.parallel.ranks import Alone, Ranks
from asyncllm.wire.messages import NO_TOKEN, Constraints, RowParams

_SMALLEST = float(np.finfo(np.float32).tiny)
#: Fields of RECORD, after the stream.
_NUMBERS = [field[0] for field in RECORD.descr[1:]]
_PENDING = np.dtype([("slot", "<i8"), ("record", RECORD)])
#: Rows whose scores are changed at once, in float32.
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one call of ``sample``, on the device.

    Attributes:
        tokens: int64 [m]; BAD_TOKEN where logits were not finite or constraints leave no token.
        logprobs: for the rows that asked for them, None if none did.
        failures: the rows whose constraints leave no token, and why.
    """

    tokens: Tensor
    logprobs: Logprobs | None
    failures: dict[int, str] = field(default_factory=dict)


class ScoreTable(Protocol):
    """Changes scores, by slot."""

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Changed scores of some rows of a batch.

        Args:
            logits: [m, vocab], any floating dtype; not modified.
            rows, slots: int64 [r]; rows of the logits, and their slots.

        Returns:
            float32 [r, vocab].
        """


class Sampler:
    """Samples the next tokens of the sequences in ``num_slots`` slots.

    Parameters act on a row's logits in this order, as in Hugging Face's and vLLM's samplers:

    1. logit biases;
    2. penalties: repetition, then presence and frequency;
    3. masks (-inf): allowed ids, bad words, grammar, and stop tokens below the minimum length;
    4. temperature;
    5. top-k, top-p of the rest, min-p; then the draw.

    Logprobs are those of unchanged logits.

    Parameters live on the device, by slot. The host keeps enough of them to know what to compute,
    so nothing here waits for the device, except that bad words and grammars wait for the previous
    step's tokens. A row's token depends only on its own logits, parameters, tokens, seed and
    position, so batching, chunking and preemption do not change the text.

    Args:
        num_slots: slots are 0 .. num_slots-1; slot num_slots, always greedy, is for padding rows.
        grammars: for rows that have one; without it they fail.
        ranks: that sample the same rows; rank 0 has the grammars.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: Device,
        grammars: Grammars[Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        # Of RECORD.
        self._table = torch.zeros(num_slots + 1, 3, dtype=torch.int64, device=device.torch_device)
        # By slot, fields of RECORD with the seed in place of the stream.
        self._pending: dict[int, tuple[float, ...]] = {}
        self._needs = np.zeros(num_slots + 1, dtype=np.int64)
        self._min_length = np.zeros(num_slots + 1, dtype=np.int64)
        self._stop_ids = [np.empty(0, dtype=np.int64)] * (num_slots + 1)
        self._num_logprobs = np.zeros(num_slots + 1, dtype=np.int64)
        # Large and rarely needed: made at first use.
        self._penalties: PenaltyTable | None = None
        self._biases: BiasTable | None = None
        self._masks: MaskTable | None = None
        self._dynamic = dynamic_masks(vocab_size, device, grammars, ranks or Alone())
        self._all_rows = torch.arange(_GROUP, device=self._device.torch_device)

    def admit(self, slot: int, params: RowParams, tokens: np.ndarray, num_prompt: int) -> None:
        """A sequence takes a slot; the next ``flush`` uploads its parameters.

        Args:
            tokens: int32 [n]; the prompt, then what was generated before a preemption.
        """
        needs = needs_of(params, self._vocab_size)
        stop_ids = np.array(params.stop_ids, dtype=np.int64)
        self._needs[slot] = needs
        # With a grammar, the mask bans stop tokens, and only where it allows other tokens.
        constraints = params.constraints or Constraints()
        bans_stops = params.stop_ids and not constraints.grammar
        self._min_length[slot] = params.min_length if bans_stops else 0
        self._stop_ids[slot] = stop_ids[stop_ids < self._vocab_size]
        self._num_logprobs[slot] = params.logprobs
        record = {name: getattr(params, name) for name in _NUMBERS}
        record["temperature"] = max(params.temperature, _SMALLEST) if needs & Need.DRAW else 0.0
        record["top_k"] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._pending[slot] = (params.seed, *record.values())
        sizes = self._num_slots, self._vocab_size
        if needs & Need.MASK:
            self._masks = self._masks or MaskTable(*sizes, self._device, self._dynamic)
            self._masks.admit(slot, params, tokens[num_prompt:])
        if needs & Need.BIAS:
            self._biases = self._biases or BiasTable(*sizes, self._device.torch_device)
            self._biases.admit(slot, params)
        if needs & Need.PENALISE:
            self._penalties = self._penalties or PenaltyTable(*sizes, self._device.torch_device)
            penalties = Penalties(
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            )
            self._penalties.admit(slot, penalties, tokens[:num_prompt], tokens[num_prompt:])

    def flush(self) -> None:
        """Upload the parameters of admitted sequences; must come before ``draw``."""
        if not self._pending:
            return
        packed = np.array(list(self._pending.items()), dtype=_PENDING)
        seeds = packed["record"]["stream"]
        # In numpy: each call into PyTorch gives up the GIL, and then waits to get it back.
        seeds[:] = stream_of(seeds)
        rows = self._device.upload(packed.view(np.int64).reshape(-1, 4))
        self._table.index_copy_(0, rows[:, 0], rows[:, 1:])
        # Only now: if the upload fails, the next flush repeats it.
        self._pending.clear()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Draw at every level from logits of this type and from changed scores, to load kernels."""
        where = np.array([self._num_slots]), np.array([0])
        for kind, integers in ((dtype, np.int32), (torch.float32, np.int64)):
            slots, positions = upload_aligned(where, integers, self._device.upload)
            logits = torch.zeros(1, self._vocab_size, dtype=kind, device=slots.device)
            for level in (Level.GREEDY, Level.DRAW, Level.FILTER):
                self.draw(logits, slots, positions, level)

    def level(self, slots: np.ndarray, lengths: np.ndarray) -> Level:
        """The cheapest level that serves all these rows; slots and lengths as for ``sample``."""
        needs = self._needs[slots]
        if (needs & (Need.CHANGE | Need.LOGPROBS)).any() or self._banning(slots, lengths).any():
            return Level.EAGER
        return draw_level(needs)

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        level: Level,
        relay: Tensor | None = None,
    ) -> Tensor:
        """Sample from unchanged logits; on a GPU, this can be captured in a graph.

        Takes the parameters of the last ``flush`` before the kernels run.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots, positions: int [m]; the position is the number of tokens the sequence has.
            level: at least that of the rows, and below EAGER.
            relay: int64 [num_slots + 1]; if given, the tokens are also written there by slot, 0 in
                place of BAD_TOKEN.

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

    @property
    def streams(self) -> Tensor:
        """Of random numbers, by slot: int64 [num_slots + 1]."""
        return self._table[:, 0]

    def sample(
        self,
        logits: Tensor,
        slots: np.ndarray,
        lengths: np.ndarray,
        drafts: np.ndarray | None = None,
    ) -> Sampled:
        """Sample one token for each row.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots, lengths: int64 [m] on the host. The length of a sequence is the position of its
                new token. Without drafts, no slot is there twice.
            drafts: int64 [m]; the token after which the next row, of the same slot, goes on;
                NO_TOKEN for none. What a row samples after a wrong draft means nothing.
        """
        self.flush()
        if drafts is None or not (self._needs[slots] & Need.FOLLOW)[drafts != NO_TOKEN].any():
            sampled = self._sample(logits, slots, lengths)
        else:
            sampled = self._sample_in_turn(logits, slots, lengths, drafts)
        asking = np.flatnonzero(self._needs[slots] & Need.LOGPROBS)
        if len(asking) == 0:
            return sampled
        wanted = self._num_logprobs[slots[asking]]
        logprobs = Logprobs(logits, sampled.tokens, asking, wanted, self._device)
        return Sampled(sampled.tokens, logprobs, sampled.failures)

    def _sample_in_turn(
        self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray, drafts: np.ndarray
    ) -> Sampled:
        """``sample``, where a token changes the scores of the next one of its sequence.

        So the rows of such a sequence are sampled one after the other, each when the one before has
        sampled what was drafted. The host waits for that.
        """
        follows = np.zeros(len(slots), dtype=bool)
        follows[1:] = (drafts[:-1] != NO_TOKEN) & ((self._needs[slots[1:]] & Need.FOLLOW) != 0)
        tokens = torch.full((len(slots),), NO_TOKEN, dtype=torch.int64, device=logits.device)
        failures: dict[int, str] = {}
        rows = np.flatnonzero(~follows)
        while len(rows):
            index = self._device.upload(rows)
            sampled = self._sample(logits.index_select(0, index), slots[rows], lengths[rows])
            tokens.index_copy_(0, index, sampled.tokens)
            failures |= {int(rows[row]): reason for row, reason in sampled.failures.items()}
            on_host = self._device.download(sampled.tokens)
            self._device.event().synchronize()
            right = rows[on_host == drafts[rows]] + 1
            rows = right[follows[right]]
        return Sampled(tokens, None, failures)

    def _sample(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Sampled:
        """``sample`` of rows that do not follow each other, without logprobs."""
        needs = self._needs[slots]
        changes = needs & Need.CHANGE
        changed = (changes != 0) | self._banning(slots, lengths)
        if changed.all():
            tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        else:
            slots_there, positions = upload_aligned((slots, lengths), np.int32, self._device.upload)
            tokens = self.draw(logits, slots_there, positions, draw_level(needs[~changed]))
        dynamic = np.flatnonzero(needs & Need.DYNAMIC)
        failures = self._refresh_masks(dynamic, slots, lengths) if len(dynamic) else {}
        for rows in _groups(changed, changes):
            self._sample_changed(logits, tokens, rows, slots[rows], lengths[rows])
        if len(dynamic) and self._masks is not None:
            sampled = tokens.index_select(0, self._device.upload(dynamic))
            self._masks.track(slots[dynamic], sampled)
        return Sampled(tokens, None, failures)

    def _refresh_masks(
        self, rows: np.ndarray, slots: np.ndarray, lengths: np.ndarray
    ) -> dict[int, str]:
        """Update these rows' masks; returns the rows that no token is left for, and why."""
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
        """Sample rows whose scores need the same changes, into ``tokens`` of the batch."""
        index, slots_there, positions = upload_aligned(
            (rows, slots, lengths), np.int64, self._device.upload
        )
        needs = self._needs[slots]
        scores = self._scores(logits, index, slots_there, int(needs[0]))
        banned = self._banning(slots, lengths)
        if banned.any():
            self._ban_stop_ids(scores, np.flatnonzero(banned), slots[banned])
        sampled = self.draw(scores, slots_there, positions, draw_level(needs))
        if needs[0] & Need.PENALISE and self._penalties is not None:
            self._penalties.add(slots_there, sampled)
        tokens.index_copy_(0, index, sampled)

    def _scores(self, logits: Tensor, rows: Tensor, slots: Tensor, needs: int) -> Tensor:
        """Changed scores of rows with the same needs: float32 [r, vocab]."""
        tables: tuple[tuple[int, ScoreTable | None], ...] = (
            (Need.BIAS, self._biases),
            (Need.PENALISE, self._penalties),
            (Need.MASK, self._masks),
        )
        scores = logits
        for need, table in tables:
            if needs & need and table is not None:
                scores = table.scores(scores, rows, slots)
                rows = self._all_rows[: len(rows)]
        return logits.index_select(0, rows).float() if scores is logits else scores

    def _banning(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Rows below their minimum length: bool [m]."""
        banning: np.ndarray = lengths < self._min_length[slots]
        return banning

    def _ban_stop_ids(self, scores: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Set the scores of these rows' stop tokens to -inf, in place."""
        ids = [self._stop_ids[slot] for slot in slots]
        where = rows.repeat([i.size for i in ids]) * self._vocab_size + np.concatenate(ids)
        # Added, not assigned, so that NaN stays NaN and is detected.
        minus_inf = scores.new_full((len(where),), -torch.inf)
        scores.view(-1).index_add_(0, self._device.upload(where), minus_inf)


def _groups(which: np.ndarray, kinds: np.ndarray) -> list[np.ndarray]:
    """The rows where ``which`` is true, in groups of at most ``_GROUP`` of one kind."""
    groups = []
    # np.unique would import numpy.ma, for which the first token would wait.
    for kind in sorted(set(kinds[which].tolist())):
        rows = np.flatnonzero(which & (kinds == kind))
        groups += [rows[start : start + _GROUP] for start in range(0, len(rows), _GROUP)]
    return groups
