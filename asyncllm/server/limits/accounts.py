"""What each API key may use in a minute, what it has used, and the headers that say what is left.

Each limit is a token bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.errors import RateLimited
from asyncllm.types import SamplingParams

#: What is reserved for an answer whose request has no ``max_tokens``.
UNSTATED_TOKENS: Final = 1024
#: Less than this is an error of rounding.
_NOTHING: Final = 1e-6

#: All that ``openai_headers`` may write.
OPENAI_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


class Bucket:
    """It refills evenly, and holds at most what one minute brings.

    So in any time t, at most ``limit * (1 + t / 60)`` is taken and not given back, besides debts:
    it may fall below zero, and then nothing can be taken until that has refilled.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self.limit = per_minute
        self._per_second = per_minute / 60
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """What is in it now; below zero, what is owed."""
        now = self._clock()
        refilled = self._level + (now - self._filled_at) * self._per_second
        self._level, self._filled_at = min(refilled, self.limit), now
        return self._level

    @property
    def remaining(self) -> int:
        """What clients are told is left."""
        return max(0, int(self.level))

    @property
    def seconds_to_full(self) -> float:
        return (self.limit - self.level) / self._per_second

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` can be taken. A full bucket is enough for any amount."""
        missing = min(amount, self.limit) - self.level
        return missing / self._per_second if missing > _NOTHING else 0.0

    def take(self, amount: float) -> None:
        """Whether there is enough is for the caller to ask; less than zero gives back."""
        self._level = min(self.level - amount, self.limit)


class Rates(NamedTuple):
    """Limits of one API key, per minute; None for no limit."""

    requests: int | None = None
    tokens: int | None = None


class Work(NamedTuple):
    """What a request will compute: tokens of its prompts, and at most so many of its answers."""

    prompt_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, sequences: Iterable[tuple[Sequence[int], SamplingParams]]) -> Self:
        """The prompt of several answers counts once, as in ``usage``."""
        prompts: dict[int, int] = {}
        most = 0
        for prompt_ids, params in sequences:
            prompts[id(prompt_ids)] = len(prompt_ids)
            most += UNSTATED_TOKENS if params.max_tokens is None else params.max_tokens
        return cls(sum(prompts.values()), most)


class Account:
    """One key's buckets.

    A request reserves the tokens of its prompt and its ``max_tokens``. When it ends, it pays for
    those of its ``usage``, however it ends, and the rest is free again. An answer that needed more
    than was reserved leaves a debt; one that reserves more than the limit waits for a full bucket.

    Attributes:
        buckets: by what they hold, "requests" or "tokens"; only of what is limited.
    """

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic):
        limits = rates._asdict().items()
        self.buckets = {kind: Bucket(most, clock) for kind, most in limits if most is not None}

    def admit(self) -> None:
        """Count a request, before anything is known of it.

        Raises:
            RateLimited: there were too many requests, or there is a debt of tokens.
        """
        self._check("requests", 1)
        self._check("tokens", 1)
        self._take("requests", 1)

    def reserve(self, work: Work) -> int:
        """Take the tokens of a request; returns how many, for ``settle``.

        Raises:
            RateLimited: there are not enough.
        """
        reserved = work.prompt_tokens + work.max_tokens
        self._check("tokens", reserved)
        self._take("tokens", reserved)
        return reserved

    def settle(self, reserved: int, used: int) -> None:
        """A request that reserved tokens has ended, and has used so many."""
        self._take("tokens", used - reserved)

    def _take(self, kind: str, amount: int) -> None:
        if (bucket := self.buckets.get(kind)) is not None:
            bucket.take(amount)

    def _check(self, kind: str, amount: int) -> None:
        bucket = self.buckets.get(kind)
        if bucket is None or not (seconds := bucket.wait(amount)):
            return
        raise RateLimited(
            f"rate limit reached for {kind} per minute: the limit is {bucket.limit}, "
            f"{bucket.remaining} remain, and {amount} would be needed; "
            f"try again in {seconds:.1f} s",
            retry_after=seconds,
        )


class Accounts:
    """An account for each key that has a limit. Without keys, all clients share one."""

    def __init__(self, rates: Mapping[str, Rates]):
        """``rates``: by tenant, whose number is the bound of this object's memory."""
        self._rates: Mapping[str, Rates] = {}
        self._accounts: dict[str, Account] = {}
        self.replace(rates)

    def replace(self, rates: Mapping[str, Rates]) -> None:
        """Limits from now on; who has the same as before keeps what is in the buckets."""
        kept = {
            tenant: account
            for tenant, account in self._accounts.items()
            if self._rates[tenant] == rates.get(tenant)
        }
        self._accounts = {
            tenant: kept.get(tenant) or Account(own)
            for tenant, own in rates.items()
            if own != Rates()
        }
        self._rates = dict(rates)

    def of(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)


#: The account that a generating request is charged to.
ACCOUNT: Final = web.RequestKey("asyncllm_account", Account)


def add_headers(app: web.Application, anthropic: Collection[Handler]) -> None:
    """Have every answer that is charged to an account say what is left.

    Args:
        anthropic: handlers whose clients know Anthropic's names.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        account = request.get(ACCOUNT)
        if account is None:
            return
        if request.match_info.handler in anthropic:
            response.headers.update(anthropic_headers(account, datetime.now(UTC)))
        else:
            response.headers.update(openai_headers(account))

    app.on_response_prepare.append(add)


def openai_headers(account: Account) -> dict[str, str]:
    """``x-ratelimit-remaining-tokens`` and others; a reset is a time until the bucket is full."""
    headers = {}
    for kind, bucket in account.buckets.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_to_full)
    return headers


def anthropic_headers(account: Account, now: datetime) -> dict[str, str]:
    """``anthropic-ratelimit-tokens-remaining`` and others; a reset is a time of day."""
    headers = {}
    for kind, bucket in account.buckets.items():
        full_at = now + timedelta(seconds=bucket.seconds_to_full)
        headers[f"anthropic-ratelimit-{kind}-limit"] = str(bucket.limit)
        headers[f"anthropic-ratelimit-{kind}-remaining"] = str(bucket.remaining)
        headers[f"anthropic-ratelimit-{kind}-reset"] = full_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes times: 80ms, 1.5s, 2m0s."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{round(rest)}s" if minutes else f"{rest:g}s"
