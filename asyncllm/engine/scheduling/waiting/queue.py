"""The waiting queue: in a policy's order, with equal shares for its accounts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence, Turn
from asyncllm.engine.scheduling.waiting.account import Account

#: The cost of a generated token in prompt tokens (Sheng et al., OSDI 2024).
OUTPUT_COST = 2.0


class WaitingQueue:
    """Next is the first request of the account that has been served least.

    An idle account comes back at the level of the account that was served last, before that one was
    charged (start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM 1996): idle time is no credit,
    and what others were charged in advance is no debt.

    Attributes:
        num_tokens: of all requests waiting.
        num_left: those of ``num_tokens`` that were not cached when their request was measured.
        num_resumed: how many of the requests had been admitted before.
        num_timely: how many have a deadline.
    """

    def __init__(self, policy: Policy):
        self.num_tokens = 0
        self.num_left = 0
        self.num_resumed = 0
        self.num_timely = 0
        self._policy = policy
        self._num_waiting = 0
        self._by_tenant: dict[str, tuple[int, int]] = {}
        self._accounts: dict[str, Account] = {}
        self._order = LazyHeap[Account](
            lambda served, account: len(account) > 0 and account.served == served
        )
        self._reversed = LazyHeap[Account](
            lambda owed, account: len(account) > 0 and account.served == -owed
        )
        self._num_active = 0
        self._level = 0.0
        self._last_cost = 0.0
        self._sweep_at = 64

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return chain.from_iterable(self._accounts.values())

    def __contains__(self, seq: Sequence) -> bool:
        account = self._accounts.get(seq.place.account or "")
        return account is not None and seq in account

    def push(self, seq: Sequence) -> None:
        """``seq`` joins the queue; its ``turn``, ``num_left`` and ``prefill_seconds`` are set."""
        account = self._account_of(seq)
        self._place(account, seq)
        if len(account) == 1:
            self._num_active += 1
            account.served = max(account.served, self._level)
            self._enter(account)
        self._count(seq, 1)

    def reorder(self, seq: Sequence) -> bool:
        """What the order depends on has changed; returns whether ``seq`` is still the next."""
        account = self._account_of(seq)
        self._displace(account, seq)
        self._place(account, seq)
        return self.peek() is seq

    @property
    def num_active(self) -> int:
        """Accounts with requests."""
        return self._num_active

    def by_deadline(self, seq: Sequence) -> Iterator[Sequence]:
        """New requests with deadlines of the account of ``seq``, the earliest first."""
        return self._account_of(seq).by_deadline()

    def ahead_of(self, seq: Sequence) -> tuple[int, int]:
        """Requests of its account surely before a newcomer with a deadline, and their tokens."""
        rank = self._policy.rank(seq.service, seq.service.num_left)
        account = self._accounts.get(self._name_of(seq))
        return (0, 0) if account is None else account.ahead_of(seq, rank)

    def num_before(self, seq: Sequence) -> int:
        """Requests of its account before ``seq``, which waits; those with deadlines about."""
        return self._account_of(seq).num_before(seq)

    def served(self, seq: Sequence) -> float:
        """The cost charged to the account of ``seq``; the account with the least comes first."""
        account = self._accounts.get(self._name_of(seq))
        return self._level if account is None else account.served

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        """How many requests of a tenant wait, and their tokens."""
        return self._by_tenant.get(tenant, (0, 0))

    def peek(self) -> Sequence | None:
        """The next request; None when none waits."""
        account = self._order.peek()
        return None if account is None else account.peek()

    def peek_short(self) -> Sequence | None:
        """The request with the first claim to the share that is kept for short prompts."""
        account = self._order.peek()
        return None if account is None else account.peek_short()

    def remove(self, seq: Sequence, *, served: bool = False) -> None:
        """``seq`` leaves the queue."""
        account = self._account_of(seq)
        self._displace(account, seq, served=served)
        if not len(account):
            self._num_active -= 1
        self._count(seq, -1)

    def serve(self, seq: Sequence, cost: float) -> None:
        """``seq`` leaves the queue to be served, at a ``cost`` charged to its account."""
        account = self._account_of(seq)
        level = account.served
        if self._num_active > 1 or len(self) == 1:
            # An account with few requests must not come before the others for ever.
            level = max(level, self._level + self._last_cost / self._num_active)
        self._last_cost = cost
        self.charge(seq, cost)
        self.remove(seq, served=True)
        # No account starts behind all others: part of the advance charges will be taken back.
        most = self._reversed.peek() or account
        self._level = min(level, most.served)

    def charge(self, seq: Sequence, cost: float) -> None:
        """Charge the account of ``seq`` more, or less; ``seq.place.charged`` is the sum."""
        account = self._account_of(seq)
        seq.place.charged += cost
        account.served += cost
        if len(account):
            self._enter(account)

    def _place(self, account: Account, seq: Sequence) -> None:
        rank = self._policy.rank(seq.service, seq.service.num_left)
        account.push(seq, rank, self._policy.short_rank(seq.service, seq.service.num_left))
        self.num_left += seq.service.num_left
        self.num_resumed += seq.place.turn is Turn.RESUMED

    def _displace(self, account: Account, seq: Sequence, *, served: bool = False) -> None:
        entry = account.remove(seq, served=served)
        self.num_left -= entry.work
        self.num_resumed -= entry.rank[0] == Turn.RESUMED

    def _enter(self, account: Account) -> None:
        self._order.push(account.served, account)
        self._reversed.push(-account.served, account)

    def _count(self, seq: Sequence, change: int) -> None:
        tokens = change * len(seq.tokens)
        self._num_waiting += change
        self.num_timely += change * (seq.service.deadline < FOREVER)
        self.num_tokens += tokens
        requests, before = self.waiting_for(seq.service.tenant)
        self._by_tenant[seq.service.tenant] = requests + change, before + tokens
        if requests + change == 0:
            del self._by_tenant[seq.service.tenant]

    def _name_of(self, seq: Sequence) -> str:
        """The policy is asked once: a request must leave the account that it entered."""
        if seq.place.account is None:
            seq.place.account = self._policy.account(seq.service)
        return seq.place.account

    def _account_of(self, seq: Sequence) -> Account:
        name = self._name_of(seq)
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = Account()
            account.served = self._level
            self._accounts[name] = account
        return account

    def _sweep(self) -> None:
        """Forget idle accounts below the level, where they would start again, and at least half."""
        idle = sorted(a.served for a in self._accounts.values() if not len(a))
        gone = max(self._level, idle[len(idle) // 2]) if idle else self._level
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if len(account) or account.served > gone
        }
        self._sweep_at = len(self._accounts) * 3 // 2 + 64
