"""Whether a request can be served, ever and now, found out before it costs anything."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Seq
from operator import index
from typing import NamedTuple

import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.prepared import is_prepared
from asyncllm.engine.scheduler import Scheduler
from asyncllm.errors import BadRequest, DeadlineExceeded, QueueFull
from asyncllm.types import SamplingParams

#: One tenant may fill the queue until so many times what is left of it is its own.
TENANT_SHARE = 8
#: Retry-After is the time in which this share of the queue is served, and at least a second.
RETRY_SHARE = 0.1


class Checked(NamedTuple):
    """The prompt, int32, and the length at which the sequence must end."""

    prompt: array[int]
    max_length: int


def check_request(prompt_ids: Seq[int], params: SamplingParams, limits: EngineLimits) -> Checked:
    """What a request comes down to that can be served.

    Raises:
        BadRequest: it can never be served (empty, too long, a token id out of range).
        TypeError: the prompt is not made of integers.
    """
    room = limits.max_model_len - len(prompt_ids)
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param="prompt")
    least = 1 if params.max_tokens is None else params.max_tokens
    if room < least:
        asked = "" if not params.max_tokens else f" and max_tokens {params.max_tokens}"
        raise BadRequest(
            f"the prompt of {len(prompt_ids)} tokens{asked} is more than the context of "
            f"{limits.max_model_len} tokens holds",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > room:
        raise BadRequest(f"min_tokens must be at most {room}, the room left", param="min_tokens")
    stops = len(params.stop_token_ids) + len(limits.eos_token_ids)
    if params.min_tokens and stops >= limits.vocab_size:
        raise BadRequest("stop_token_ids leave no token for min_tokens", param="stop_token_ids")
    prompt = _token_array(prompt_ids, limits.vocab_size)
    if any(t >= limits.vocab_size for t in params.stop_token_ids):
        raise BadRequest(
            f"stop_token_ids must be between 0 and {limits.vocab_size - 1}",
            param="stop_token_ids",
        )
    if not is_prepared(params):
        raise BadRequest("constraints on tokens must be made ready by AsyncLLM.prepare")
    return Checked(prompt, len(prompt) + (room if params.max_tokens is None else params.max_tokens))


def _token_array(prompt_ids: Seq[int], vocab_size: int) -> array[int]:
    """A prompt in int32; it may be long, so no token of it is looked at in Python.

    Raises: as ``check_request`` does.
    """
    try:
        # Takes half as long as making an array of the ids themselves.
        prompt = array("i", struct.pack(f"{len(prompt_ids)}i", *prompt_ids))
        known = bool(np.frombuffer(prompt, np.uint32).max() < vocab_size)  # negative is large
    except struct.error:
        for token_id in prompt_ids:
            index(token_id)  # a TypeError, if it is no integer
        known = False
    if not known:
        raise BadRequest(f"prompt token ids must be between 0 and {vocab_size - 1}", param="prompt")
    return prompt


def check_room(
    scheduler: Scheduler, limits: EngineLimits, num_tokens: int, num_requests: int, tenant: str
) -> None:
    """Whether prompts of at least so many tokens in all may join the queue.

    A tenant may have a multiple of what is left of the queue, so that there is always something
    left for another (dynamic thresholds; Choudhury and Hahne, IEEE/ACM ToN 1998).

    Args:
        tenant: "" is nobody's.

    Raises:
        QueueFull: not now; ``retry_after`` says when.
    """
    waiting, tokens = scheduler.num_waiting, scheduler.num_waiting_tokens
    # Those that the next plan takes in are not waiting.
    places = limits.max_waiting + scheduler.num_free_slots - waiting
    room = limits.max_waiting_tokens - tokens
    fits = num_requests <= places and (waiting == 0 or num_tokens <= room)
    if fits and tenant and waiting:
        mine, my_tokens = scheduler.waiting_for(tenant)
        fits = mine + num_requests <= TENANT_SHARE * places
        fits = fits and my_tokens + num_tokens <= TENANT_SHARE * room
    if fits:
        return
    raise QueueFull(
        f"{waiting} requests with {tokens} prompt tokens are waiting already",
        retry_after=max(1.0, RETRY_SHARE * scheduler.expected_wait()),
    )


def check_deadline(left: float, needed: float) -> None:
    """Whether an answer that takes at least ``needed`` seconds can be there in ``left``.

    Raises:
        DeadlineExceeded: it cannot.
    """
    if needed > left:
        raise DeadlineExceeded(
            f"the deadline of {left * 1000:.0f} ms cannot be met: the answer would take at "
            f"least {needed * 1000:.0f} ms",
            param="deadline_ms",
        )
