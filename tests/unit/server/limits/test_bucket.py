"""A bucket against arithmetic that needs no clock: what may be taken in any stretch of time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncllm.errors import RateLimited
from asyncllm.server.limits.accounts import (
    Account,
    Accounts,
    Bucket,
    Rates,
    Work,
    anthropic_headers,
    duration,
    openai_headers,
)
from asyncllm.types import SamplingParams

LIMIT = 600  # ten a second


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class BucketMachine(RuleBasedStateMachine):
    """Requests that reserve, run at the same time, and end with less or more than reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Time()
        self.account = Account(Rates(tokens=LIMIT), self.time)
        self.reserved: list[int] = []
        #: (when, amount) of what was used or is reserved, each counted from its reservation on.
        self.taken: list[tuple[float, float]] = []
        self.debts = 0.0

    @property
    def bucket(self) -> Bucket:
        return self.account.buckets["tokens"]

    @rule(seconds=st.floats(0, 200))
    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds

    @rule(prompt=st.integers(0, 2 * LIMIT), most=st.integers(0, LIMIT))
    def reserve(self, prompt: int, most: int) -> None:
        need, level = prompt + most, self.bucket.level
        wait = self.bucket.wait(need)
        if wait > 0:
            assert level < min(need, LIMIT)
            with pytest.raises(RateLimited) as caught:
                self.account.reserve(Work(prompt, most))
            assert caught.value.retry_after == wait
            # That time is enough, and less is not.
            self.time.now += 0.9 * wait
            assert wait < 1e-3 or self.bucket.wait(need) > 0
            self.time.now += 0.1 * wait + 1e-6
            assert self.bucket.wait(need) == 0
        else:
            assert level > min(need, LIMIT) - 1e-3
            self.reserved.append(self.account.reserve(Work(prompt, most)))
            self.debts += max(0, need - LIMIT)
            self.taken.append((self.time.now, need))

    @rule(index=st.integers(0, 10), share=st.floats(0, 1.5))
    def settle(self, index: int, share: float) -> None:
        if index >= len(self.reserved):
            return
        reserved = self.reserved.pop(index)
        used = int(share * reserved)
        self.account.settle(reserved, used)
        self.debts += max(0, used - reserved)
        place = next(i for i, (_, amount) in enumerate(self.taken) if amount == reserved)
        self.taken[place] = (self.taken[place][0], float(used))

    @invariant()
    def it_holds_at_most_a_minute(self) -> None:
        assert self.bucket.level <= LIMIT
        assert self.bucket.seconds_to_full >= 0

    @invariant()
    def no_more_is_used_than_the_limit_says(self) -> None:
        total = sum(amount for _, amount in self.taken)
        seconds = self.time.now - 1000.0
        assert total <= LIMIT * (1 + seconds / 60) + self.debts + 1e-3


TestBucket = BucketMachine.TestCase


def test_an_unused_reservation_is_free_again() -> None:
    account = Account(Rates(tokens=100), Time())
    reserved = account.reserve(Work(30, 70))
    with pytest.raises(RateLimited) as caught:
        account.reserve(Work(10, 0))
    assert caught.value.retry_after == pytest.approx(6)
    account.settle(reserved, 35)
    assert account.buckets["tokens"].level == 65


def test_debts_are_paid_before_anything_else() -> None:
    time = Time()
    account = Account(Rates(tokens=60), time)
    account.settle(account.reserve(Work(500, 0)), 500)  # the bucket was full
    with pytest.raises(RateLimited, match="the limit is 60, 0 remain, and 1 would be needed"):
        account.admit()
    time.now += 441
    account.admit()


def test_a_refused_request_takes_nothing() -> None:
    account = Account(Rates(requests=2, tokens=100), Time())
    account.settle(account.reserve(Work(200, 0)), 200)
    for _ in range(3):
        with pytest.raises(RateLimited, match="tokens per minute"):
            account.admit()
    assert account.buckets["requests"].level == 2


def test_work_is_counted_as_in_usage() -> None:
    prompt, other = [1] * 10, [2] * 10
    short, open_ended = SamplingParams(max_tokens=5), SamplingParams()
    assert Work.of([(prompt, short), (prompt, short)]) == Work(10, 10)
    assert Work.of([(prompt, short), (other, open_ended)]) == Work(20, 5 + 1024)


def test_only_keys_with_limits_have_an_account() -> None:
    accounts = Accounts({"key-1": Rates(), "key-2": Rates(tokens=5)})
    assert accounts.of("key-1") is accounts.of("unknown") is None
    assert accounts.of("key-2") is accounts.of("key-2") is not None


def test_headers() -> None:
    time = Time()
    account = Account(Rates(requests=60, tokens=6000), time)
    account.admit()
    account.reserve(Work(1000, 5500))
    assert openai_headers(account) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m5s",
    }
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert anthropic_headers(account, now) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-01-01T00:00:01Z",
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-01-01T00:01:05Z",
    }
    assert openai_headers(Account(Rates())) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.08, "80ms"), (1.5, "1.5s"), (59.96, "1m0s"), (3600, "60m0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
