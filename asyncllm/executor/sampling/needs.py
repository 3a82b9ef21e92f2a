"""What a slot's sampling parameters need beyond the likeliest token."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from msgspec.structs import replace

from asyncllm.executor.sampling.constraints import is_dynamic, is_masked
from asyncllm.kernels.scores import mask_width
from asyncllm.wire.messages import Constraints, RowParams, pack


class Need:
    """Bits, for arrays of int64; plain integers, because flags of ``enum`` are slow."""

    DRAW: Final = 1
    FILTER: Final = 2
    LOGPROBS: Final = 4
    MASK: Final = 8
    BIAS: Final = 16
    PENALISE: Final = 32
    #: A mask that changes with every token.
    DYNAMIC: Final = 64
    #: Those that change scores.
    CHANGE: Final = MASK | BIAS | PENALISE
    #: Those whose changes depend on the token before.
    FOLLOW: Final = PENALISE | DYNAMIC


class Level(IntEnum):
    """What the rows of a step need; each level includes those before it."""

    GREEDY = 0
    DRAW = 1
    FILTER = 2
    #: Changed scores or logprobs: only ``Sampler.sample`` does these.
    EAGER = 3


def needs_of(params: RowParams, vocab_size: int) -> int:
    """The bits of ``Need`` for these parameters."""
    needs = 0
    # top_k 1 leaves nothing to draw.
    if params.temperature > 0 and params.top_k != 1:
        needs |= Need.DRAW
        if 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0:
            needs |= Need.FILTER
    constraints = params.constraints or Constraints()
    if is_masked(constraints):
        needs |= Need.MASK
    if is_dynamic(constraints):
        needs |= Need.DYNAMIC
    if constraints.bias_ids:
        needs |= Need.BIAS
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        needs |= Need.PENALISE
    if params.logprobs >= 0:
        needs |= Need.LOGPROBS
    return needs


def costly_params(vocab_size: int) -> tuple[RowParams, ...]:
    """Parameters that take the most memory: all needs at once, then apart.

    These are biases, penalties, bans, sorting for top-p, min-p and logprobs.
    """
    everything = RowParams(
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logprobs=min(20, vocab_size),
        min_length=2**30,
        stop_ids=(0,),
        constraints=Constraints(pack([0]), bytes(4), bytes(4 * mask_width(vocab_size))),
    )
    masked = Constraints(mask=bytes(4 * mask_width(vocab_size)))
    masked_only = RowParams(temperature=0.0, constraints=masked)
    return everything, replace(everything, constraints=None), masked_only


def draw_level(needs: np.ndarray) -> Level:
    """The level at which ``Sampler.draw`` serves rows with these needs."""
    some = int(np.bitwise_or.reduce(needs))
    if some & Need.FILTER:
        return Level.FILTER
    return Level.DRAW if some & Need.DRAW else Level.GREEDY
