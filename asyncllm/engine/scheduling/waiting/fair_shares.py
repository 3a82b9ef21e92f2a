"""Equal shares for the accounts of the waiting queue."""

from __future__ import annotations

from collections.abc import Iterator

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.waiting.account import Account


class FairShares:
    """Owns the accounts: next is the one with requests that has been served least.

    An idle account comes back at the level of the account that was served last, before that one was
    charged (start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM 1996): idle time is no credit,
    and what others were charged in advance is no debt.

    Attributes:
        num_active: accounts with requests.
    """

    def __init__(self, policy: Policy):
        self.num_active = 0
        self._policy = policy
        self._accounts: dict[str, Account] = {}
        self._order = LazyHeap[Account](
            lambda served, account: len(account) > 0 and account.served == served
        )
        self._reversed = LazyHeap[Account](
            lambda owed, account: len(account) > 0 and account.served == -owed
        )
        self._level = 0.0
        self._last_cost = 0.0
        self._sweep_at = 64

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def first(self) -> Account | None:
        """The account whose turn it is; None when nobody waits."""
        return self._order.peek()

    def known(self, seq: Sequence) -> Account | None:
        """The account of ``seq``, if there is one yet."""
        return self._accounts.get(self._name_of(seq))

    def account_of(self, seq: Sequence) -> Account:
        """The account of ``seq``, made if there is none."""
        account = self.known(seq)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = Account()
            account.served = self._level
            self._accounts[self._name_of(seq)] = account
        return account

    def begin(self, account: Account) -> None:
        """An account has its first request."""
        self.num_active += 1
        account.served = max(account.served, self._level)
        self._enter(account)

    def end(self) -> None:
        """An account has no requests any more."""
        self.num_active -= 1

    def served(self, seq: Sequence) -> float:
        """The cost charged to the account of ``seq``; the account with the least comes first."""
        account = self.known(seq)
        return self._level if account is None else account.served

    def charge(self, seq: Sequence, cost: float) -> None:
        """Charge the account of ``seq`` more, or less; ``seq.place.charged`` is the sum."""
        account = self.account_of(seq)
        seq.place.charged += cost
        account.served += cost
        if len(account):
            self._enter(account)

    def level_after(self, account: Account, cost: float, *, alone: bool) -> float:
        """Where idle accounts come back, once a request of ``account`` is served at a ``cost``.

        Args:
            alone: no other request waits.
        """
        level = account.served
        if self.num_active > 1 or alone:
            # An account with few requests must not come before the others for ever.
            level = max(level, self._level + self._last_cost / self.num_active)
        self._last_cost = cost
        return level

    def raise_level(self, level: float, served: Account) -> None:
        """``served`` is charged, and its request has left."""
        # No account starts behind all others: part of the advance charges will be taken back.
        most = self._reversed.peek() or served
        self._level = min(level, most.served)

    def _enter(self, account: Account) -> None:
        self._order.push(account.served, account)
        self._reversed.push(-account.served, account)

    def _name_of(self, seq: Sequence) -> str:
        """The policy is asked once: a request must leave the account that it entered."""
        if seq.place.account is None:
            seq.place.account = self._policy.account(seq.service)
        return seq.place.account

    def _sweep(self) -> None:
        """Forget idle accounts below the level, where they would start again, and at least half."""
        idle = sorted(a.served for a in self if not len(a))
        gone = max(self._level, idle[len(idle) // 2]) if idle else self._level
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if len(account) or account.served > gone
        }
        self._sweep_at = len(self._accounts) * 3 // 2 + 64
