"""Reservations: places in the waiting queue for requests that are still being tokenized."""

from __future__ import annotations

from collections import Counter
from typing import Protocol, Self

from asyncllm.config import EngineLimits
from asyncllm.errors import QueueFull

#: One tenant may fill the queue until it holds this multiple of the room that is left.
TENANT_SHARE = 8
#: Retry-After is the time in which this share of the queue is served, at least a second.
RETRY_SHARE = 0.1


class Queue(Protocol):
    """The scheduler, as far as it is needed here."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    def waiting_for(self, tenant: str) -> tuple[int, int]: ...
    def expected_wait(self) -> float: ...


class Reservations:
    """Decides which requests may join the queue, and counts those that may and have not yet.

    Tokenizing takes a while. Without reservations, all requests that arrive in that time would
    find the same free places. The scheduler does not know of reservations.
    """

    def __init__(self, queue: Queue, limits: EngineLimits):
        self.num_requests = 0
        self._num_tokens = 0
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self._queue = queue
        self._limits = limits

    def make(self, num_tokens: int, num_requests: int, tenant: str) -> Reservation:
        """Reserve places for prompts of at least ``num_tokens`` in all; no tenant is "".

        Raises:
            QueueFull: there is no room now; ``retry_after`` says when.
        """
        reservation = Reservation(self, tenant)
        reservation.expect(num_tokens, num_requests)
        return reservation

    def check(self, num_tokens: int, num_requests: int, tenant: str) -> None:
        """Raise as ``make`` unless the queue has room beside all reservations.

        A tenant may have a multiple of the room that is left in the queue, so that there is always
        some for another (dynamic thresholds; Choudhury and Hahne, IEEE/ACM ToN 1998).
        """
        queue = self._queue
        waiting = queue.num_waiting + self.num_requests
        tokens = queue.num_waiting_tokens + self._num_tokens
        # Requests that the next plan admits do not count as waiting.
        places = self._limits.max_waiting + queue.num_free_slots - waiting
        room = self._limits.max_waiting_tokens - tokens
        full = ""
        if num_requests > places:
            full = "requests"
        elif waiting and num_tokens > room:
            full = "tokens"
        elif tenant and waiting:
            mine, my_tokens = queue.waiting_for(tenant)
            mine += self._requests_of[tenant] + num_requests
            my_tokens += self._tokens_of[tenant] + num_tokens
            if mine > TENANT_SHARE * places or my_tokens > TENANT_SHARE * room:
                full = "share"
        if not full:
            return
        raise QueueFull(
            f"{waiting} requests with {tokens} prompt tokens are waiting already",
            retry_after=max(1.0, RETRY_SHARE * queue.expected_wait()),
            cause=full,
        )

    def count(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """For ``Reservation`` only: a tenant has reserved more, or less."""
        self.num_requests += num_requests
        self._num_tokens += num_tokens
        if not tenant:
            return
        self._requests_of[tenant] += num_requests
        self._tokens_of[tenant] += num_tokens
        if not self._requests_of[tenant]:
            del self._requests_of[tenant], self._tokens_of[tenant]


class Reservation:
    """Places for one or several requests; leaving its context gives back those that are left.

    Attributes:
        num_requests, num_tokens: reserved and not taken; without requests there are no tokens.
    """

    __slots__ = ("_reservations", "_tenant", "num_requests", "num_tokens")

    def __init__(self, reservations: Reservations, tenant: str):
        self.num_requests = 0
        self.num_tokens = 0
        self._reservations = reservations
        self._tenant = tenant

    def expect(self, num_tokens: int, num_requests: int | None = None) -> None:
        """Change it to prompts of at least ``num_tokens`` in all; None keeps ``num_requests``.

        Raises:
            QueueFull: that does not fit; nothing is reserved any more.
        """
        if num_requests is None:
            num_requests = self.num_requests
        if (num_tokens, num_requests) == (self.num_tokens, self.num_requests):
            return  # these places are held already
        self.release()
        self._reservations.check(num_tokens, num_requests, self._tenant)
        self._set(num_requests, num_tokens)

    def take(self, num_tokens: int) -> None:
        """One of the requests joins the queue, with a prompt of ``num_tokens``.

        Raises:
            QueueFull: it is longer than expected, and the queue has no room for that.
        """
        if self.num_requests == 0 or num_tokens > self.num_tokens:
            self.expect(max(num_tokens, self.num_tokens), max(1, self.num_requests))
        left = self.num_requests - 1
        self._set(left, self.num_tokens - num_tokens if left else 0)

    def release(self) -> None:
        """Give back what is left; idempotent."""
        self._set(0, 0)

    def _set(self, num_requests: int, num_tokens: int) -> None:
        more, longer = num_requests - self.num_requests, num_tokens - self.num_tokens
        if more or longer:
            self._reservations.count(self._tenant, more, longer)
            self.num_requests, self.num_tokens = num_requests, num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
