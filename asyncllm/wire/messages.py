"""The messages between the event loop and the ranks: immutable msgspec structs.

Arrays are little-endian int32 bytes, so packing and unpacking cost one copy, however many rows a
step has. Rank 0's thread and tensor-parallel peers read the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

from asyncllm.errors import BadRequest
from asyncllm.types import LogitParams, Reasoning

#: ``StepResult.tokens`` of a row that samples nothing (a prompt chunk that is not the last).
NO_TOKEN = -1
#: ``StepResult.tokens`` of a row whose logits were not finite, or that is among ``failures``.
BAD_TOKEN = -2
#: In ``StepPlan.drafts``, a token that only the device knows.
UNKNOWN_DRAFT = -2
#: Directions in ``StepPlan.copies``: of pages, and of recurrent states.
TO_HOST = 0
TO_DEVICE = 1
STATE_TO_HOST = 2
STATE_TO_DEVICE = 3


class Constraints(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that a sequence may have or prefers; empty fields constrain nothing.

    Attributes:
        bias_ids, biases: int32 and float32 [k], k <= MAX_LOGIT_BIAS; no id twice.
        mask: int32 [ceil(vocab / 32)]; bit i % 32 of word i // 32 is 0 if token i is never allowed.
        bad_words: different sequences of two or more tokens that are not to be generated.
        grammar: its key in the sampler's table of grammars.
        reasoning: comes before the grammar, or is of limited length.
    """

    bias_ids: bytes = b""
    biases: bytes = b""
    mask: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: bytes = b""
    reasoning: Reasoning | None = None


class RowParams(LogitParams, frozen=True, kw_only=True, array_like=True, gc=False):
    """The part of SamplingParams that acts on logits, with every default resolved.

    ``logprobs`` is -1 for none. Until the sequence has ``min_length`` tokens, prompt included, the
    tokens in ``stop_ids`` are not sampled, unless a grammar allows nothing else.
    """

    seed: int = 0
    logprobs: int = -1
    min_length: int = 0
    stop_ids: tuple[int, ...] = ()
    constraints: Constraints | None = None


class Admit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence takes a slot; ``tokens`` is int32 [num_tokens], all its tokens so far.

    The first ``num_prompt`` are the prompt; more follow when a preempted sequence comes back.
    ``prompt_logprobs`` is -1, or how many of the likeliest tokens are wanted with the logprob of
    each prompt token that its rows compute. ``pool_from`` is -1, or the first position of the
    prompt whose hidden state is wanted.
    """

    slot: int
    tokens: bytes
    num_prompt: int
    params: RowParams
    prompt_logprobs: int = -1
    pool_from: int = -1


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of the model over a mixed batch, and page copies to run at the same time.

    A plan without rows only waits for the copies under way.

    Attributes:
        step: number of the step, counting up from 0.
        rows: int32 [n, 3] of (slot, start, q_len). A row that starts beyond the tokens its slot was
            admitted with is a decode row: its input token is the last one sampled for that slot,
            which only the device knows. A row that reaches the end of the known tokens samples the
            next one. A decode row of several tokens verifies a draft: q_len - 1 of ``drafts``
            follow its input token. It samples a token after each of its tokens, as long as the
            token before was drafted right.
        new_pages: int32 [m, 3] of (slot, index in the block table, page).
        admits: sequences that enter a slot, before any of their rows.
        copies: int32 [k, 3] of (direction, device page, host page). Until a result acknowledges the
            copies, steps only read their source pages; so copies need no ordering with the steps'
            kernels. A recurrent state takes several host pages: it has an entry with its state
            slot for each, one after the other. Its copy to the device comes after ``state_copies``
            and all earlier steps, which may still use the slot.
        decode_steps: how many tokens each row yields, one after the other (multi-step decoding).
            More than one only if all rows are decode rows; there are pages for all tokens.
        state_copies: int32 [k, 2] of (source, destination): recurrent states that are copied from
            one state slot to another, in order, before the rows are computed.
        state_slots: int32 [n]: where each row's recurrent state is read and written. A row that
            starts at position 0 starts from an empty state, whatever the slot has. Empty for
            models without recurrent layers.
        drafts: int32; the drafted tokens of all rows that have some, in the order of the rows. A
            token of UNKNOWN_DRAFT is what the device drafted for that place of the row.
        doubts: int32 [m, 3] of (row, most, meant): rows that follow drafts whose result was not
            known when this was planned. Such a row starts where the last row of its slot got to,
            which is up to ``most`` positions before the start that is promised here. What the host
            drafted for it is meant for a start ``meant`` positions before.
        ahead: how many tokens the model's head drafts after this step, for each row that samples.
            0: none; but in steps with prompts it goes over all tokens, for those to come.
    """

    step: int
    rows: bytes
    new_pages: bytes
    admits: tuple[Admit, ...]
    copies: bytes = b""
    decode_steps: int = 1
    state_copies: bytes = b""
    state_slots: bytes = b""
    drafts: bytes = b""
    doubts: bytes = b""
    ahead: int = 0


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of one row: of the sampled token, and of the likeliest tokens, best first."""

    row: int
    sampled: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class ScoredPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of the prompt tokens that one row's positions predict.

    Each row with prompt tokens of a sequence that wants them has one, maybe empty. Values that are
    not finite are passed on: the row fails when it samples.

    Attributes:
        row: of the plan.
        start, end: tokens at positions start .. end-1 are scored; position 0 never is.
        logprobs: float32 [n, 1 + k]; of the token, then of the k likeliest tokens, best first.
        ids: int32 [n, 1 + k]; the token's rank, 1 for the likeliest, then the k tokens' ids.
    """

    row: int
    start: int
    end: int
    logprobs: bytes
    ids: bytes


class PooledPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sum of the wanted hidden states of one row.

    Attributes:
        row: of the plan.
        start, end: the prompt's positions start .. end-1; at least one.
        total: float32 [hidden_size]; states before the output projection. Values that are not
            finite are passed on.
    """

    row: int
    start: int
    end: int
    total: bytes


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of one StepPlan; there is exactly one, also when the step failed.

    Attributes:
        step: the plan's number.
        tokens: int32 [k * n]: one token of each row, then each row's next, and so on; NO_TOKEN or
            BAD_TOKEN for none. k is the number of decode steps or, with drafts, the length of the
            longest row: a row that verifies has one token more than were drafted right. Tokens
            after the end of a sequence are ignored.
        logprobs: for the rows that want them; ``row`` is an index of ``tokens``.
        copied: the plans whose copies are done: (step, the seconds they took), once each.
        seconds: the device's time for this step alone.
        error: None, or what went wrong; then no row of this step has advanced.
        t_launch, t_done: seconds of the engine's clock; launched, and seen to be done.
        launch_seconds, collect_seconds: the executor thread's time for launching the step, and for
            reading its finished outcome.
        idle_seconds: the device's idle time before this step; None if unknown.
        prompts: for the rows with prompt tokens whose logprobs are wanted.
        pooled: for the rows with positions whose hidden states are wanted.
        failures: (index of ``tokens``, why) of rows whose constraints leave no token.
    """

    step: int
    tokens: bytes
    logprobs: tuple[RowLogprobs, ...]
    error: str | None
    t_launch: float
    t_done: float
    copied: tuple[tuple[int, float], ...] = ()
    seconds: float = 0.0
    launch_seconds: float = 0.0
    collect_seconds: float = 0.0
    idle_seconds: float | None = None
    prompts: tuple[ScoredPrompt, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()


class PlanHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a StepPlan that does not come from requests, and so can always be decoded."""

    step: int
    rows: bytes
    new_pages: bytes
    admits: tuple[msgspec.Raw, ...]
    copies: bytes = b""
    decode_steps: int = 1
    state_copies: bytes = b""


encode = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(StepPlan).decode
decode_plan_head = msgspec.msgpack.Decoder(PlanHead).decode
_decode_params = msgspec.msgpack.Decoder(RowParams).decode
decode_result = msgspec.msgpack.Decoder(StepResult).decode


def check_params(params: RowParams) -> None:
    """Raise BadRequest, naming the value out of range, unless the executor can decode these."""
    try:
        _decode_params(encode(params))
    except (msgspec.MsgspecError, OverflowError, UnicodeError) as error:
        raise BadRequest(f"a sampling parameter is out of range: {error}") from None


def pack(values: Iterable[int]) -> bytes:
    """int32 bytes of Python ints; rows are given flat."""
    # array() takes a list of ints in a third of the time that numpy needs.
    return array("i", values).tobytes()


def unpack(data: bytes, columns: int = 1) -> np.ndarray:
    """The int32 array in ``data``, read-only: [n], or [n, columns] when columns > 1."""
    array = np.frombuffer(data, dtype="<i4")
    return array.reshape(-1, columns) if columns > 1 else array
