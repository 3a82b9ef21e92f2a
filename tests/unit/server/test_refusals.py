"""Why requests are refused, in a few words that clients cannot add to."""

from __future__ import annotations

import pytest
from aiohttp import web

from asyncllm.errors import (
    AsyncLLMError,
    BadRequest,
    ConstraintError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    NotFound,
    NotReady,
    QueueFull,
    RateLimited,
    StepError,
    TooLarge,
    Unauthorized,
)
from asyncllm.server.http.errors import HttpError, Refusals


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (QueueFull("full", retry_after=1.0), "queue_requests"),
        (QueueFull("full", retry_after=1.0, cause="tokens"), "queue_tokens"),
        (QueueFull("full", retry_after=1.0, cause="share"), "queue_share"),
        (RateLimited("too many", retry_after=1.0), "rate"),
        (ContextLengthExceeded(10, 20), "infeasible"),
        (DeadlineExceeded("late"), "deadline"),
        (BadRequest("odd", code="unknown_parameter"), "invalid"),
        (BadRequest("odd", code="made up"), "invalid"),
        (Unauthorized("who?"), "unauthorized"),
        (HttpError("whose page?", 403), "forbidden"),
        (NotFound("no such model", code="model_not_found"), "not_found"),
        (TooLarge("too large"), "too_large"),
        (NotReady("loading"), "not_ready"),
        (EngineDead("gone"), "engine_dead"),
        (HttpError("slow", 408), "slow_body"),
        (HttpError("no room", 503), "busy"),
        (HttpError("teapot", 418), "other"),
        (web.HTTPNotFound(), "not_found"),
        (web.HTTPMethodNotAllowed("GET", ["POST"]), "not_found"),
    ],
)
def test_causes(error: Exception, cause: str) -> None:
    refusals = Refusals()
    known = set(refusals.counts)
    refusals.count(error)
    assert +refusals.counts == {cause: 1}
    assert set(refusals.counts) == known, "the labels are there from the beginning"


@pytest.mark.parametrize("error", [StepError("x"), ConstraintError("x")])
def test_failures_in_the_engine_are_counted_there(error: AsyncLLMError) -> None:
    refusals = Refusals()
    refusals.count(error)
    assert not +refusals.counts
