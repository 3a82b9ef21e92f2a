"""Sequence: one prompt and what has been generated for it, as the scheduler sees it.

Each part of a sequence has one owner, which changes it; all others only read it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from asyncllm.engine.cache.pages import BlockTable
from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.scheduling.timeline import Timeline
from asyncllm.engine.token_constraints import PreparedParams
from asyncllm.types import LogitParams, SamplingParams, SchedulingParams
from asyncllm.wire.messages import RowParams

FOREVER = float("inf")
#: Tokens prefilled in a second, while the device's rate is not known.
FIRST_RATE = 40_000.0


class SeqState(enum.Enum):
    """WAITING (also after a preemption, tokens kept) -> LOADING -> WAITING -> RUNNING -> FINISHED.

    LOADING: its prefix is being copied back from the host.
    """

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Turn(enum.IntEnum):
    """The order of a queue, before any rank.

    RESUMED: it was admitted before, and its client waits in the middle of an answer. LATE: its
    deadline will probably pass, so others that can be in time go first.
    """

    RESUMED = 0
    NEW = 1
    LATE = 2


class Service:
    """Its class of service, and the prompt that is left: what a policy sees (``policy.Ranked``).

    Attributes:
        arrival, deadline: seconds of the scheduler's clock.
        num_left, prefill_seconds: tokens still to be prefilled when it was last looked at, and the
            time that takes; what is cached is not counted.
    """

    __slots__ = (
        "arrival",
        "deadline",
        "id",
        "max_length",
        "num_left",
        "num_prompt",
        "prefill_seconds",
        "priority",
        "tenant",
    )

    def __init__(
        self, id: int, num_prompt: int, max_length: int, arrival: float, params: SchedulingParams
    ):
        self.id = id
        self.num_prompt = self.num_left = num_prompt
        self.max_length = max_length
        self.arrival = arrival
        timeout = params.deadline_ms
        self.deadline = FOREVER if timeout is None else arrival + timeout / 1000
        self.priority = params.priority
        self.tenant = params.tenant
        self.prefill_seconds = num_prompt / FIRST_RATE


@dataclass(slots=True)
class QueuePlace:
    """Its place in the waiting queue, which alone changes it.

    Attributes:
        turn: its class; set when it joins.
        account: the account that pays for it; None until the queue has asked the policy.
        charged: the cost charged to the account for it so far.
    """

    turn: Turn = Turn.NEW
    account: str | None = None
    charged: float = 0.0


class Output:
    """What it may generate, and what ends that.

    Attributes:
        params: how the device samples.
        compiled: its grammar, which the executor looks up by its key while the sequence lives.
        max_length: the sequence ends when it has this many tokens.
        min_length: stop tokens count beyond this many.
        surely_full: only its length can end it.
        bin: where its output is among the bins of ``OutputLengths``.
    """

    __slots__ = ("bin", "compiled", "max_length", "min_length", "params", "stop_ids", "surely_full")

    def __init__(
        self,
        num_prompt: int,
        params: SamplingParams,
        *,
        max_length: int,
        eos_ids: tuple[int, ...],
        seed: int,
    ):
        constraints = params.constraints if isinstance(params, PreparedParams) else None
        self.compiled = params.compiled if isinstance(params, PreparedParams) else None
        # A grammar has an end, which may come before its time: the sampler sees to that.
        ends = constraints is not None and bool(constraints.grammar)
        self.max_length = max_length
        self.min_length = num_prompt + (0 if ends else params.min_tokens)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset(eos_ids) if ends or not params.ignore_eos else frozenset()
        )
        self.surely_full = (not self.stop_ids and not params.stop) or params.max_tokens == 0
        self.bin = 0
        self.params = RowParams(
            **{name: getattr(params, name) for name in LogitParams.__struct_fields__},
            seed=seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            min_length=num_prompt + params.min_tokens,
            stop_ids=tuple(sorted(self.stop_ids)),
            constraints=constraints,
        )


class PromptReads:
    """What is wanted of the positions of its prompt, beside their KV.

    Attributes:
        logprobs: alternatives wanted with each prompt token's logprob; -1: no logprobs.
        pool_from: the first position whose hidden state is wanted; -1: none.
        done: positions whose logprobs or hidden states have been read.
    """

    __slots__ = ("_num_prompt", "done", "logprobs", "pool_from")

    def __init__(self, num_prompt: int, params: SamplingParams):
        self._num_prompt = num_prompt
        self.logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.pool_from = -1
        if isinstance(params, PooledParams):
            self.pool_from = params.first_wanted(num_prompt)
        self.done = 0

    @property
    def pending(self) -> bool:
        """Whether something is still wanted of each position, cached or not.

        That is, logprobs or the sum of all hidden states.
        """
        wanted = self.logprobs >= 0 or self.pool_from == 0
        return wanted and self.done < self._num_prompt


class Sequence:
    """A request as the scheduler sees it, on the loop.

    How far it is computed is kept by slot, in ``RunningBatch``.

    Attributes:
        tokens: prompt and output so far; int32, only grows.
        wanted: its results in flight are wanted: it has not ended, and is not suspected of making
            steps fail.
        slot: its place on the device; -1 for none. In any state, it keeps slot and pages until no
            step in flight has a row of it.
        num_cached: prompt tokens found in the cache when it was first admitted; -1 before.
        num_failures: how many failed steps it was in.
        kv: its pages.
        output: what it may generate.
        reads: what is wanted of its prompt.
        service: when it is to be served.
        place: where it is in the queue.
        timeline: what happened to it, and when.
        drafting: guesses of its next tokens; None if nothing is drafted for it.
    """

    __slots__ = (
        "drafting",
        "id",
        "kv",
        "num_cached",
        "num_failures",
        "num_prompt",
        "output",
        "place",
        "reads",
        "service",
        "slot",
        "state",
        "timeline",
        "tokens",
        "wanted",
    )

    def __init__(
        self,
        id: int,
        prompt: Seq[int],
        params: SamplingParams,
        scheduling: SchedulingParams,
        *,
        max_length: int,
        eos_ids: tuple[int, ...],
        seed: int,
        arrival: float,
    ):
        self.id = id
        self.tokens = array("i", prompt)
        self.num_prompt = num_prompt = len(prompt)
        self.state = SeqState.WAITING
        self.wanted = True
        self.slot = -1
        self.num_cached = -1
        self.num_failures = 0
        self.kv = BlockTable(self.tokens, scheduling.salt, scheduling.cache_ttl_s)
        self.output = Output(num_prompt, params, max_length=max_length, eos_ids=eos_ids, seed=seed)
        self.reads = PromptReads(num_prompt, params)
        self.service = Service(id, num_prompt, max_length, arrival, scheduling)
        self.place = QueuePlace()
        self.timeline = Timeline(arrival)
        self.drafting: Drafting | None = None

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt
