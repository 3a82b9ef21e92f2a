"""Accounts: what each API key may use in a minute, and what it has used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiohttp import web

from asyncllm.errors import RateLimited
from asyncllm.server.limits.bucket import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncllm.types import SamplingParams

#: What is reserved for an answer whose request has no ``max_tokens``.
UNSTATED_TOKENS: Final = 1024


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
    """

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic):
        self.requests = None if rates.requests is None else Bucket(rates.requests, clock)
        self.tokens = None if rates.tokens is None else Bucket(rates.tokens, clock)

    def admit(self) -> None:
        """Count a request, before anything is known of it.

        Raises:
            RateLimited: there were too many requests, or there is a debt of tokens.
        """
        _check("requests", self.requests, 1)
        _check("tokens", self.tokens, 1)
        if self.requests is not None:
            self.requests.take(1)

    def reserve(self, work: Work) -> int:
        """Take the tokens of a request; returns how many, for ``settle``.

        Raises:
            RateLimited: there are not enough.
        """
        reserved = work.prompt_tokens + work.max_tokens
        _check("tokens", self.tokens, reserved)
        if self.tokens is not None:
            self.tokens.take(reserved)
        return reserved

    def settle(self, reserved: int, used: int) -> None:
        """A request that reserved tokens has ended, and has used so many."""
        if self.tokens is not None:
            self.tokens.give_back(reserved - used)


def _check(what: str, bucket: Bucket | None, amount: int) -> None:
    if bucket is None or not (seconds := bucket.wait(amount)):
        return
    raise RateLimited(
        f"rate limit reached for {what} per minute: the limit is {bucket.limit}, "
        f"{max(0, int(bucket.level))} remain, and {amount} would be needed; "
        f"try again in {seconds:.1f} s",
        retry_after=seconds,
    )


class Accounts:
    """An account for each key that has a limit. Without keys, all clients share one."""

    def __init__(
        self,
        rates: Mapping[str, Rates],
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            rates: by tenant, whose number is the bound of this object's memory.
        """
        self._clock = clock
        self._rates: Mapping[str, Rates] = {}
        self._accounts: dict[str, Account] = {}
        self.replace(rates)

    def replace(self, rates: Mapping[str, Rates]) -> None:
        """Limits from now on; who has the same as before keeps what is in the buckets."""
        self._accounts = {
            tenant: (
                self._accounts[tenant]
                if self._rates.get(tenant) == own
                else Account(own, self._clock)
            )
            for tenant, own in rates.items()
            if own != Rates()
        }
        self._rates = dict(rates)

    def of(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)


#: The account that a generating request is charged to.
ACCOUNT: Final = web.RequestKey("asyncllm_account", Account)
