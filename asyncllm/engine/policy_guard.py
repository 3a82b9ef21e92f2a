"""PolicyGuard: errors of a policy fail the request in question, not the scheduler."""

from __future__ import annotations

from asyncllm.engine.policy import Policy, Ranked

#: The rank of a request that the policy raised for; the request ends before that matters.
LAST = float("inf")


class PolicyGuard(Policy):
    """Asks a policy, which may be a user's, and keeps the errors that it raises.

    An exception halfway through an update would corrupt the waiting queue.
    """

    def __init__(self, policy: Policy):
        self.evenly = policy.evenly
        self._policy = policy
        self._failures: dict[int, tuple[Ranked, Exception]] = {}

    def rank(self, request: Ranked, remaining: int) -> float:
        try:
            return _number(self._policy.rank(request, remaining))
        except Exception as error:
            self._failures.setdefault(id(request), (request, error))
            return LAST

    def short_rank(self, request: Ranked, remaining: int) -> float | None:
        try:
            rank = self._policy.short_rank(request, remaining)
            return None if rank is None else _number(rank)
        except Exception as error:
            self._failures.setdefault(id(request), (request, error))
            return None

    def account(self, request: Ranked) -> str:
        try:
            account: object = self._policy.account(request)
            if not isinstance(account, str):
                raise TypeError(f"the account is {type(account).__name__}, not str")
            return account
        except Exception as error:
            self._failures.setdefault(id(request), (request, error))
            return ""

    def take_failures(self) -> list[tuple[Ranked, Exception]]:
        """Requests that the policy raised for since the last call, each with its first error."""
        if not self._failures:
            return []
        failures, self._failures = list(self._failures.values()), {}
        return failures


def _number(rank: float) -> float:
    rank = float(rank)
    if rank != rank:
        raise ValueError("the rank is not a number")
    return rank
