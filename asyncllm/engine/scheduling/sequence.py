"""Sequence: one prompt and what has been generated for it, as the scheduler sees it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Seq

from asyncllm.engine.cache.node import Node
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


class Sequence:
    """Everything the scheduler knows of a request; owned by the scheduler, on the loop.

    How far it is computed is kept by slot, in ``RunningBatch``.

    Attributes:
        tokens: prompt and output so far; int32, only grows.
        max_length: the sequence ends when it has this many tokens.
        surely_full: only its length can end it.
        arrival, deadline: seconds of the scheduler's clock.
        cache_ttl: ``SchedulingParams.cache_ttl_s``.
        slot: its place on the device; -1 for none. In any state, it keeps slot and pages until no
            step in flight has a row of it.
        pages, node, known, first_own, salt: the cache's (``cache.manager.PageHolder``).
        turn: its class in the queue; set when it joins.
        num_left, prefill_seconds: tokens still to be prefilled when it was last looked at, and the
            time that takes; what is cached is not counted.
        num_cached: prompt tokens found in the cache when it was first admitted.
        prompt_logprobs: alternatives wanted with each prompt token's logprob; -1: no logprobs.
        pool_from: the first position whose hidden state is wanted; -1: none.
        num_read: prompt positions whose logprobs or hidden states have been read.
        num_found: pages that it found in the cache when it was last admitted.
        expected_pages: how many pages it is expected to have at its end.
        output_bin: where its output is among the bins of ``OutputLengths``.
        account: the account that pays for it; None until the queue has asked the policy.
        compiled: its grammar, which the executor looks up by its key while the sequence lives.
        charged: the cost charged to its account for it (``engine/scheduling/waiting/``).
        failed: some of its KV is not to be trusted.
        num_failures: how many failed steps it was in.
        suspect: a step with it failed, and its slot is not free yet; its results in flight are
            ignored.
        timeline: what happened to it, and when.
    """

    __slots__ = (
        "account",
        "arrival",
        "cache_ttl",
        "charged",
        "compiled",
        "deadline",
        "expected_pages",
        "failed",
        "first_own",
        "id",
        "known",
        "max_length",
        "min_length",
        "node",
        "num_cached",
        "num_failures",
        "num_found",
        "num_left",
        "num_prompt",
        "num_read",
        "output_bin",
        "pages",
        "pool_from",
        "prefill_seconds",
        "priority",
        "prompt_logprobs",
        "row_params",
        "salt",
        "slot",
        "state",
        "stop_ids",
        "surely_full",
        "suspect",
        "tenant",
        "timeline",
        "tokens",
        "turn",
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
        self.num_prompt = len(prompt)
        self.max_length = max_length
        constraints = params.constraints if isinstance(params, PreparedParams) else None
        self.compiled = params.compiled if isinstance(params, PreparedParams) else None
        # A grammar has an end, which may come before its time: the sampler sees to that.
        ends = constraints is not None and bool(constraints.grammar)
        self.min_length = len(prompt) + (0 if ends else params.min_tokens)
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset(eos_ids) if ends or not params.ignore_eos else frozenset()
        )
        self.surely_full = (not self.stop_ids and not params.stop) or params.max_tokens == 0
        self.row_params = RowParams(
            **{name: getattr(params, name) for name in LogitParams.__struct_fields__},
            seed=seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            min_length=len(prompt) + params.min_tokens,
            stop_ids=tuple(sorted(self.stop_ids)),
            constraints=constraints,
        )
        self.priority = scheduling.priority
        self.tenant = scheduling.tenant
        self.arrival = arrival
        timeout = scheduling.deadline_ms
        self.deadline = FOREVER if timeout is None else arrival + timeout / 1000
        self.cache_ttl = scheduling.cache_ttl_s
        self.state = SeqState.WAITING
        self.slot = -1
        self.pages: list[int] = []
        self.node: Node | None = None
        self.known: Node | None = None
        self.first_own: Node | None = None
        self.salt = scheduling.salt
        self.turn = Turn.NEW
        self.num_left = len(prompt)
        self.prefill_seconds = len(prompt) / FIRST_RATE
        self.num_cached = -1
        self.prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.pool_from = -1
        if isinstance(params, PooledParams):
            self.pool_from = params.first_wanted(len(prompt))
        self.num_read = 0
        self.num_found = 0
        self.expected_pages = 0
        self.output_bin = 0
        self.account: str | None = None
        self.charged = 0.0
        self.failed = False
        self.num_failures = 0
        self.suspect = False
        self.timeline = Timeline(arrival)

    @property
    def short_lived(self) -> bool:
        """Whether it gives its pages up for good and expects nobody to want them again."""
        return self.cache_ttl == 0 and self.state is not SeqState.WAITING

    @property
    def wanted(self) -> bool:
        """Whether its results in flight are still wanted, and trusted."""
        return self.state is not SeqState.FINISHED and not self.suspect

    @property
    def reading(self) -> bool:
        """Whether something is still wanted of each position of its prompt, cached or not.

        That is, logprobs or the sum of all hidden states.
        """
        wanted = self.prompt_logprobs >= 0 or self.pool_from == 0
        return wanted and self.num_read < self.num_prompt
