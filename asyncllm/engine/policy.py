"""Policies: who is served next. Small pure classes; write your own by overriding a method or two.

A policy orders requests by ``rank``, the smallest first, and may sort them into accounts that get
equal shares. It is asked when a request starts to wait and when prompt chunks compete for a step,
and must answer from its arguments alone.
"""

from __future__ import annotations

from typing import Protocol

#: One class of priority is worth so many seconds of waiting.
PRIORITY_SECONDS = 5.0
#: So many tokens left to prefill are worth one second of waiting.
AGEING_TOKENS = 4096.0


class Ranked(Protocol):
    """What a policy may look at.

    Attributes:
        arrival, deadline: seconds; the deadline is infinite for those without.
        priority: lower is more urgent.
        tenant: on whose behalf.
        num_prompt, max_length: tokens of the prompt, and the most that the sequence may come to.
    """

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


class Policy:
    """First come, first served; the base of all others.

    Attributes:
        evenly: prompts of a batch may wait as long as it ends no later for that (see
            ``engine/scheduling/pace.py``).
    """

    evenly = False

    def rank(self, request: Ranked, remaining: int) -> float:
        """The place in the order of service, smallest first.

        Args:
            remaining: tokens that are still to be prefilled.
        """
        return request.arrival

    def account(self, request: Ranked) -> str:
        """The account that pays for it; each account with requests waiting gets the same share."""
        return ""


class Aged(Policy):
    """Shortest remaining prompt first, with priorities, deadlines and ageing.

    A request's rank is the time of its arrival plus a handicap, so it can be overtaken only by
    those that arrive at most ``handicap`` seconds after it: one second for each AGEING_TOKENS of
    its prompt, and PRIORITY_SECONDS for each class that it is less urgent than they are. Its wait
    is thus bounded by the work that arrived up to then, whatever comes later. Nearer deadlines go
    first where they are earlier than that.
    """

    def rank(self, request: Ranked, remaining: int) -> float:
        handicap = remaining / AGEING_TOKENS + PRIORITY_SECONDS * request.priority
        return min(request.arrival + handicap, request.deadline)


class Fair(Aged):
    """The same within each tenant, and equal shares among tenants, by tokens.

    Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
    see ``engine/scheduling/waiting.py``.
    """

    def account(self, request: Ranked) -> str:
        return request.tenant


class LongestFirst(Policy):
    """Longest output first, for batches whose ``max_tokens`` are what will be generated.

    It keeps the last steps of a batch from running with few rows. New arrivals can starve old
    ones, so it is not for serving.
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
