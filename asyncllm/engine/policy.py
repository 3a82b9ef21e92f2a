"""Policies: which request is served next. Write your own by overriding one or two methods.

A policy orders requests by ``rank``, the smallest first, and may sort them into accounts that get
equal shares. It is called when a request starts to wait and when prompt chunks compete for a step,
and must be a pure function of its arguments.
"""

from __future__ import annotations

from typing import Protocol

#: Seconds of waiting that one class of priority is worth.
PRIORITY_SECONDS = 5.0
#: Seconds of waiting that one second of prefill is worth.
AGEING = 10.0
#: Tokens left to prefill that one class of priority is worth, in the share for short prompts.
PRIORITY_TOKENS = 20_000


class Ranked(Protocol):
    """A request, as a policy sees it.

    Attributes:
        id: its own; later requests have higher ones.
        arrival, deadline: seconds; the deadline is infinite for requests without one.
        priority: lower is more urgent.
        num_prompt, max_length: tokens of the prompt, and the most that prompt and output may have.
        prefill_seconds: the time that its tokens still to be prefilled take on this device.
    """

    @property
    def id(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...


class Policy:
    """First come, first served; the base of all others.

    Attributes:
        evenly: prompts of a batch may wait as long as the batch ends no later for that (see
            ``engine/scheduling/pace.py``).
    """

    evenly = False

    def rank(self, request: Ranked, remaining: int) -> float:
        """The place in the order of service, smallest first.

        Args:
            remaining: tokens still to be prefilled; those in the prefix cache are not.
        """
        return request.arrival

    def short_rank(self, request: Ranked, remaining: int) -> float | None:
        """The place in the order for the share of each step that is kept for short prompts.

        None: no share of it. Arguments as of ``rank``.
        """
        return None

    def account(self, request: Ranked) -> str:
        """The account of the request; each account with waiting requests gets the same share."""
        return ""


class Aged(Policy):
    """Shortest remaining prompt first, with priorities, deadlines and ageing.

    A request's rank is the time of its arrival plus a handicap: AGEING times the time that its
    prefill still takes, and PRIORITY_SECONDS for each class of priority. So only requests that
    arrive at most ``handicap`` seconds later can overtake it, and its wait is bounded by the work
    that has arrived by then. A deadline earlier than that is the rank instead.

    The share for short prompts goes by length alone: a wall of long prompts that came before does
    not hold up a short one.
    """

    def rank(self, request: Ranked, remaining: int) -> float:
        handicap = AGEING * request.prefill_seconds + PRIORITY_SECONDS * request.priority
        return min(request.arrival + handicap, request.deadline)

    def short_rank(self, request: Ranked, remaining: int) -> float | None:
        return remaining + PRIORITY_TOKENS * request.priority


class Fair(Aged):
    """``Aged`` within each tenant, and equal shares of tokens among tenants.

    Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
    see ``engine/scheduling/waiting/``.
    """

    def account(self, request: Ranked) -> str:
        return request.tenant


class LongestFirst(Policy):
    """Longest output first, for batches whose ``max_tokens`` are what will be generated.

    It keeps the last steps of a batch from running with few rows. New requests can starve old ones,
    so it is not for serving.
    """

    evenly = True

    def rank(self, request: Ranked, remaining: int) -> float:
        return float(request.num_prompt - request.max_length)


#: The policies that configuration can name.
POLICIES: dict[str, type[Policy]] = {
    "fair": Fair,
    "aged": Aged,
    "fcfs": Policy,
    "longest": LongestFirst,
}


#: The rank of a request that the policy raised for; the request ends before that matters.
LAST = float("inf")


class PolicyGuard(Policy):
    """Asks a policy, which may be a user's, and keeps the errors that it raises.

    An exception halfway through an update would corrupt the waiting queue.
    """

    def __init__(self, policy: Policy):
        self.evenly = policy.evenly
        self._policy = policy
        self._failures: dict[int, Exception] = {}

    def rank(self, request: Ranked, remaining: int) -> float:
        try:
            return _number(self._policy.rank(request, remaining))
        except Exception as error:
            self._failures.setdefault(request.id, error)
            return LAST

    def short_rank(self, request: Ranked, remaining: int) -> float | None:
        try:
            rank = self._policy.short_rank(request, remaining)
            return None if rank is None else _number(rank)
        except Exception as error:
            self._failures.setdefault(request.id, error)
            return None

    def account(self, request: Ranked) -> str:
        try:
            account: object = self._policy.account(request)
            if not isinstance(account, str):
                raise TypeError(f"the account is {type(account).__name__}, not str")
            return account
        except Exception as error:
            self._failures.setdefault(request.id, error)
            return ""

    def take_failures(self) -> dict[int, Exception]:
        """By request, the first error that the policy raised for it since the last call."""
        failures, self._failures = self._failures, {}
        return failures


def _number(rank: float) -> float:
    rank = float(rank)
    if rank != rank:
        raise ValueError("the rank is not a number")
    return rank
