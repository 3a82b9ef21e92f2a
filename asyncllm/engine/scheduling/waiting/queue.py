"""The waiting queue: in a policy's order, with equal shares for its accounts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence, Turn
from asyncllm.engine.scheduling.waiting.account import Account
from asyncllm.engine.scheduling.waiting.fair_shares import FairShares

#: The cost of a generated token in prompt tokens (Sheng et al., OSDI 2024).
OUTPUT_COST = 2.0


class WaitingQueue:
    """Next is the first request of the account that has been served least.

    Attributes:
        shares: the accounts, and what each has been served.
        num_tokens: of all requests waiting.
        num_left: those of ``num_tokens`` that were not cached when their request was measured.
        num_resumed: how many of the requests had been admitted before.
        num_timely: how many have a deadline.
    """

    def __init__(self, policy: Policy):
        self.shares = FairShares(policy)
        self.num_tokens = 0
        self.num_left = 0
        self.num_resumed = 0
        self.num_timely = 0
        self._policy = policy
        self._num_waiting = 0
        self._by_tenant: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return chain.from_iterable(self.shares)

    def some(self, count: int) -> Iterator[Sequence]:
        """Up to ``count`` of them, in no particular order."""
        return islice(chain.from_iterable(self.shares), count)

    def __contains__(self, seq: Sequence) -> bool:
        account = None if seq.place.account is None else self.shares.known(seq)
        return account is not None and seq in account

    def push(self, seq: Sequence) -> None:
        """``seq`` joins the queue; its ``service`` and its turn are up to date."""
        account = self.shares.account_of(seq)
        self._place(account, seq)
        if len(account) == 1:
            self.shares.begin(account)
        self._count(seq, 1)

    def reorder(self, seq: Sequence) -> bool:
        """What the order depends on has changed; returns whether ``seq`` is still the next."""
        account = self.shares.account_of(seq)
        self._displace(account, seq)
        self._place(account, seq)
        return self.peek() is seq

    def by_deadline(self, seq: Sequence) -> Iterator[Sequence]:
        """New requests with deadlines of the account of ``seq``, the earliest first."""
        return self.shares.account_of(seq).by_deadline()

    def ahead_of(self, seq: Sequence) -> tuple[int, int]:
        """Requests of its account surely before a newcomer with a deadline, and their tokens."""
        rank = self._policy.rank(seq.service, seq.service.num_left)
        account = self.shares.known(seq)
        return (0, 0) if account is None else account.ahead_of(seq, rank)

    def num_before(self, seq: Sequence) -> int:
        """Requests of its account before ``seq``, which waits; those with deadlines about."""
        return self.shares.account_of(seq).num_before(seq)

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        """How many requests of a tenant wait, and their tokens."""
        return self._by_tenant.get(tenant, (0, 0))

    def peek(self) -> Sequence | None:
        """The next request; None when none waits."""
        account = self.shares.first()
        return None if account is None else account.peek()

    def peek_short(self) -> Sequence | None:
        """The request with the first claim to the share that is kept for short prompts."""
        account = self.shares.first()
        return None if account is None else account.peek_short()

    def remove(self, seq: Sequence, *, served: bool = False) -> None:
        """``seq`` leaves the queue."""
        account = self.shares.account_of(seq)
        self._displace(account, seq, served=served)
        if not len(account):
            self.shares.end()
        self._count(seq, -1)

    def serve(self, seq: Sequence, cost: float) -> None:
        """``seq`` leaves the queue to be served, at a ``cost`` charged to its account."""
        account = self.shares.account_of(seq)
        level = self.shares.level_after(account, cost, alone=len(self) == 1)
        self.shares.charge(seq, cost)
        self.remove(seq, served=True)
        self.shares.raise_level(level, account)

    def _place(self, account: Account, seq: Sequence) -> None:
        service = seq.service
        rank = self._policy.rank(service, service.num_left)
        account.push(seq, rank, self._policy.short_rank(service, service.num_left))
        self.num_left += service.num_left
        self.num_resumed += seq.place.turn is Turn.RESUMED

    def _displace(self, account: Account, seq: Sequence, *, served: bool = False) -> None:
        entry = account.remove(seq, served=served)
        self.num_left -= entry.work
        self.num_resumed -= entry.rank[0] == Turn.RESUMED

    def _count(self, seq: Sequence, change: int) -> None:
        tokens, tenant = change * len(seq.tokens), seq.service.tenant
        self._num_waiting += change
        self.num_timely += change * (seq.service.deadline < FOREVER)
        self.num_tokens += tokens
        requests, before = self.waiting_for(tenant)
        self._by_tenant[tenant] = requests + change, before + tokens
        if requests + change == 0:
            del self._by_tenant[tenant]
