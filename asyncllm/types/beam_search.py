"""What is asked of a beam search, and what it finds."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.types import MAX_LOGPROBS, Completion, Int32
from asyncllm.types.validate import check_fields

MAX_BEAMS: Final = 64
#: Each of them makes every step look at ``beam_width`` more candidates of every beam.
MAX_STOP_TOKENS: Final = 8

Width = Annotated[int, Meta(ge=1, le=MAX_BEAMS)]
Length = Annotated[int, Meta(ge=1, lt=2**31)]
StopTokens = Annotated[tuple[Int32, ...], Meta(max_length=MAX_STOP_TOKENS)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search. The score of a beam is its logprob divided by length ** length_penalty.

    Attributes:
        beam_width: how many beams are continued, and how many are returned.
        max_tokens: most tokens of a beam; None means all the room left in the context.
        length_penalty: above 0, longer beams are favoured (their logprobs are negative).
        early_stopping: when to end, as transformers has it. True: once there are ``beam_width``
            finished beams. False: once no running beam would be among those if it ended now.
            "never": once none can be, however long it becomes.
        ignore_eos: beams do not end at the model's own end-of-sequence tokens.
        stop_token_ids: further token ids that end a beam; a few only.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_tokens: ids of those that stay in it all the same.
        logprobs: None for none; n for each token's and the n likeliest tokens'.
        temperature: 0, as nothing is drawn.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    beam_width: Width
    max_tokens: Length | None = None
    length_penalty: Penalty = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: StopTokens = ()
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[Int32, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature != 0:
            raise BadRequest("beam search needs temperature 0", param="temperature")


class Beam(Completion):
    """One continuation; its ``logprob`` is the sum over its tokens, an end token included."""

    logprob: float = 0.0
    score: float = 0.0


class Search(Protocol):
    """A beam search that is still to be run."""

    async def run(self) -> list[Beam]: ...
