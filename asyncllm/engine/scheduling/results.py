"""Results: what the tokens of a step, or its failure, mean for its sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.speculation.choice import Drafted, Speculation
from asyncllm.engine.scheduling.step import Emitted, Step
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.types import FinishReason
from asyncllm.wire.messages import BAD_TOKEN, NO_TOKEN


@dataclass(eq=False)
class Results:
    """Gives sequences their tokens, and ends them. Owns nothing.

    Args:
        finish: ends a sequence, at a time.
    """

    cache: KVCacheManager
    batch: RunningBatch
    trials: Trials
    speculation: Speculation
    finish: Callable[[Sequence, float], None]

    def take(self, step: Step, tokens: list[int], unmet: set[int], now: float) -> list[Emitted]:
        """The new tokens in row order; rows of ended sequences, and others without one, give none.

        Args:
            unmet: rows whose constraints allowed no token; their KV is valid.
        """
        emitted = []
        decodes = step.decodes
        for first in range(0, step.decode_steps * len(decodes), len(decodes) or 1):
            for row, seq in enumerate(decodes, first):
                if tokens[row] == BAD_TOKEN:  # also of sequences that have ended
                    seq.kv.corrupt |= row not in unmet
                if seq.wanted:
                    emitted.append(self._take_token(seq, row, tokens[row], now))
        for row, draft in enumerate(step.drafts, len(decodes)):
            own = step.tokens_of(tokens, row)
            emitted += self._take_verified(draft, own, row, step.num_rows, unmet, now)
        for row, chunk in enumerate(step.chunks, step.num_decodes):
            seq, token = chunk.seq, tokens[row]
            seq.kv.corrupt |= token == BAD_TOKEN and row not in unmet
            if not seq.kv.corrupt:
                self.cache.computed(seq.kv, chunk.end)
            if seq.wanted and seq.reads.pending:
                seq.reads.done = chunk.end
            if chunk.samples and seq.wanted:
                emitted.append(self._take_first_token(seq, row, token, now))
        return emitted

    def _take_verified(
        self,
        draft: Drafted,
        tokens: list[int],
        row: int,
        num_rows: int,
        unmet: set[int],
        now: float,
    ) -> list[Emitted]:
        """The tokens of a row that verified a draft: what was right, and one more."""
        seq = draft.seq
        self.batch.verified(seq, len(draft.tokens), len(tokens) - 1)
        self.speculation.verified(draft, len(tokens) - 1)
        emitted = []
        for index, token in enumerate(tokens):
            at = row + index * num_rows
            if token == BAD_TOKEN:
                seq.kv.corrupt |= at not in unmet
            if seq.wanted:
                emitted.append(self._take_token(seq, at, token, now))
        return emitted

    def fail(self, step: Step, now: float) -> list[Sequence]:
        """Distrust all KV of a failed step's sequences; returns the sequences that end.

        A sequence that was alone in the step ends. Of several, each is tried again.
        """
        for draft in step.drafts:
            self.batch.verified(draft.seq, len(draft.tokens), 0)
        others = (*(draft.seq for draft in step.drafts), *(chunk.seq for chunk in step.chunks))
        rows = {seq.id: seq for seq in (*step.decodes, *others)}
        alive = [seq for seq in rows.values() if seq.wanted]
        for seq in rows.values():
            seq.kv.corrupt = True
        causes = alive
        if len(rows) > 1 and alive:
            computed = self.batch.computed
            suspects = [(seq, int(computed[seq.slot])) for seq in alive]
            causes = self.trials.suspect(suspects, step.admitted)
            for seq in alive:
                seq.wanted = False
        for seq in causes:
            self.finish(seq, now)
        return causes

    def _take_first_token(self, seq: Sequence, row: int, token: int, now: float) -> Emitted:
        """The token after the prompt, unless the sequence was to generate none."""
        if len(seq.tokens) < seq.output.max_length or token == BAD_TOKEN:
            return self._take_token(seq, row, token, now)
        self.finish(seq, now)
        return Emitted(seq, row, NO_TOKEN, FinishReason.LENGTH)

    def _take_token(self, seq: Sequence, row: int, token: int, now: float) -> Emitted:
        if token == BAD_TOKEN:
            self.finish(seq, now)
            return Emitted(seq, row, token, None)
        tokens, output = seq.tokens, seq.output
        tokens.append(token)
        finish = None
        if token in output.stop_ids and len(tokens) > output.min_length:
            finish = FinishReason.STOP
        elif len(tokens) >= output.max_length:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.finish(seq, now)
        return Emitted(seq, row, token, finish)
