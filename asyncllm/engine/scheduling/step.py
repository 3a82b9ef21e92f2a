"""Step: one iteration while it is planned, and while it is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.speculation.choice import Drafted
from asyncllm.engine.scheduling.states import States
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.types import FinishReason
from asyncllm.wire.messages import (
    NO_TOKEN,
    Admit,
    PooledPrompt,
    ScoredPrompt,
    StepPlan,
    StepResult,
    pack,
    unpack,
)

NOTHING = StepShape(0, 0, 0.0)
#: What planning may cost, in pages whose entries are made or looked up; 0.25 us each. A newcomer
#: costs as much as 100 besides. So a plan admits 90 prompts of 160 tokens, or 16 that share 8,000,
#: in less than 5 ms.
MOST_PAGES, NEWCOMER_PAGES = 10_000, 100


class Chunk(NamedTuple):
    """A prompt chunk; ``end`` is the position after it, ``samples`` that the prompt ends there."""

    seq: Sequence
    end: int
    samples: bool


@dataclass(slots=True)
class Step:
    """A plan, and the sequences of its rows: first ``decodes``, then ``drafts``, then ``chunks``.

    ``decode_rows`` is the decode rows' part of ``StepPlan.rows``; the lists of ints are flat, as in
    the message. Each decode row yields ``decode_steps`` tokens; ``shape`` is that of one of these
    steps. ``reads``: logprobs or hidden states of prompts are wanted, which ``shape`` leaves out.
    ``cost``, of planning, counts against ``MOST_PAGES``.
    """

    number: int
    decodes: list[Sequence] = field(default_factory=list)
    decode_rows: bytes = b""
    drafts: tuple[Drafted, ...] = ()
    doubts: list[int] = field(default_factory=list)
    ahead: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    shape: StepShape = NOTHING
    decode_steps: int = 1
    reads: bool = False
    cost: int = 0

    @property
    def has_rows(self) -> bool:
        return bool(self.decodes or self.drafts or self.chunks)

    @property
    def num_decodes(self) -> int:
        """Rows that are no prompt chunks."""
        return len(self.decodes) + len(self.drafts)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + len(self.chunks)

    @property
    def admits_more(self) -> bool:
        """False once planning has taken long enough: the event loop has more to do."""
        return self.cost < MOST_PAGES

    def add_cost(self, num_pages: int) -> None:
        """A newcomer with a path of so many pages was admitted, or has to wait for it."""
        self.cost += NEWCOMER_PAGES + num_pages

    def admit(self, seq: Sequence) -> None:
        """``seq`` has taken a slot."""
        self.add_cost(len(seq.kv.pages))
        self.admitted.append(seq)
        tokens = seq.tokens.tobytes()
        scored = seq.reads.logprobs if seq.reads.pending else -1
        # Hidden states that were read before a preemption are not read again.
        pooled = (
            seq.reads.pool_from
            if seq.reads.pool_from < 0
            else max(seq.reads.pool_from, seq.reads.done)
        )
        self.admits.append(
            Admit(seq.slot, tokens, seq.num_prompt, seq.output.params, scored, pooled)
        )
        self.add_pages(seq, 0)

    def add_pages(self, seq: Sequence, first: int) -> None:
        """Tell the device the pages from index ``first`` on."""
        pages = seq.kv.pages[first:]
        slots, indices = repeat(seq.slot), range(first, first + len(pages))
        self.new_pages += chain.from_iterable(zip(slots, indices, pages, strict=False))

    def drop_pages(self, slot: int) -> None:
        """The slot's owner was preempted; this plan may give the slot to another sequence."""
        rest = [entry for entry in _triples(self.new_pages) if entry[0] != slot]
        self.new_pages = [value for entry in rest for value in entry]

    def add_chunk(self, chunk: Chunk, start: int) -> None:
        q_len = chunk.end - start
        self.reads |= chunk.seq.reads.pending
        self.chunks.append(chunk)
        self.chunk_rows += (chunk.seq.slot, start, q_len)
        tokens, kv_tokens, attention = self.shape
        pairs = q_len * (start + q_len / 2)
        self.shape = StepShape(tokens + q_len, kv_tokens, attention + pairs)

    def tokens_of(self, tokens: list[int], row: int) -> list[int]:
        """The tokens of a row with a draft, given all of the result: at least one."""
        own = tokens[row :: self.num_rows]
        return own[: own.index(NO_TOKEN)] if NO_TOKEN in own else own

    def num_right(self, result: StepResult) -> tuple[int, ...]:
        """How many drafted tokens of each row with a draft were right."""
        if not self.drafts or result.error is not None:
            return ()
        tokens, first = unpack(result.tokens).tolist(), len(self.decodes)
        rows = range(first, first + len(self.drafts))
        return tuple(len(self.tokens_of(tokens, row)) - 1 for row in rows)

    def message(self, copies: bytes, states: States) -> StepPlan:
        drafted = [value for each in self.drafts for value in each.row]
        rows = self.decode_rows + pack(drafted + self.chunk_rows)
        state_copies, state_slots = states.plan(self.number, rows)
        return StepPlan(
            step=self.number,
            rows=rows,
            new_pages=pack(self.new_pages),
            admits=tuple(self.admits),
            copies=copies,
            decode_steps=self.decode_steps,
            state_copies=state_copies,
            state_slots=state_slots,
            drafts=pack(token for each in self.drafts for token in each.tokens),
            doubts=pack(self.doubts),
            ahead=self.ahead,
        )


def _triples(flat: list[int]) -> Iterator[tuple[int, int, int]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


#: What a step found out about a prompt.
PromptPart: TypeAlias = ScoredPrompt | PooledPrompt


class Planned(NamedTuple):
    """A step to submit, the sequences that it admits, its tokens, and its decode rows."""

    message: StepPlan
    admitted: list[Sequence]
    num_tokens: int
    num_decodes: int


class Emitted(NamedTuple):
    """One new token of one sequence; ``row`` is its row in the step.

    A BAD_TOKEN (the row's logits were not finite, or its constraints left no token) is emitted
    once, and ends the sequence. A NO_TOKEN ends a sequence that was to generate nothing.
    """

    seq: Sequence
    row: int
    token: int
    finish: FinishReason | None


class Applied(NamedTuple):
    """The new tokens in row order, or the sequences that made a step fail, which end here.

    ``read`` is what was wanted of prompts; it is delivered before the tokens.
    """

    emitted: list[Emitted]
    failed: list[Sequence]
    read: list[tuple[Sequence, PromptPart]]
