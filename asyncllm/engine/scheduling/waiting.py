"""The waiting queue: in a policy's order, with equal shares for its accounts."""

from __future__ import annotations

from collections.abc import Iterator

from asyncllm.cache.lazy_heap import LazyHeap
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.sequence import Sequence

#: The cost of a generated token in prompt tokens (Sheng et al., OSDI 2024).
OUTPUT_COST = 2.0


class _Account:
    """``served`` is the cost charged so far; ``queue`` has its waiting requests, by rank."""

    __slots__ = ("num_waiting", "queue", "served")

    def __init__(self, queue: LazyHeap[Sequence]):
        self.queue = queue
        self.num_waiting = 0
        self.served = 0.0


class WaitingQueue:
    """Next is the request of smallest rank, of the account that has been served least.

    Every operation is O(log n) in the number waiting. An idle account comes back at the level of
    the account that was served last, before that one was charged (start-time fair queueing; Goyal,
    Vin and Cheng, SIGCOMM 1996): idle time is no credit, and what others were charged in advance is
    no debt.
    """

    def __init__(self, policy: Policy):
        self.num_tokens = 0
        self._policy = policy
        self._ranks: dict[int, float] = {}
        self._by_tenant: dict[str, tuple[int, int]] = {}
        self._accounts: dict[str, _Account] = {}
        self._order = LazyHeap[_Account](
            lambda served, account: account.num_waiting > 0 and account.served == served
        )
        self._reversed = LazyHeap[_Account](
            lambda owed, account: account.num_waiting > 0 and account.served == -owed
        )
        self._num_active = 0
        self._level = 0.0
        self._last_cost = 0.0
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        waiting = {seq.id: seq for account in self._accounts.values() for _, seq in account.queue}
        return iter(waiting.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._ranks

    def push(self, seq: Sequence) -> None:
        """``seq`` joins the queue."""
        rank = self._policy.rank(seq, len(seq.tokens))
        account = self._account_of(seq)
        # First, because the heaps drop entries that do not count.
        self._ranks[seq.id] = rank
        account.num_waiting += 1
        if account.num_waiting == 1:
            self._num_active += 1
            account.served = max(account.served, self._level)
            self._enter(account)
        account.queue.push(rank, seq)
        self._count(seq, 1)

    def ahead_of(self, seq: Sequence) -> tuple[int, int]:
        """Requests of its account before a newcomer, and their tokens; O(n) in those waiting."""
        rank = self._policy.rank(seq, len(seq.tokens))
        account = self._accounts.get(self._name_of(seq))
        if account is None:
            return 0, 0
        ahead = {other.id: len(other.tokens) for place, other in account.queue if place <= rank}
        return len(ahead), sum(ahead.values())

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
        return None if account is None else account.queue.peek()

    def remove(self, seq: Sequence) -> None:
        """``seq`` leaves the queue."""
        del self._ranks[seq.id]
        account = self._account_of(seq)
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._num_active -= 1
            account.queue.clear()
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
        self.remove(seq)
        # No account starts behind all others: part of the advance charges will be taken back.
        most = self._reversed.peek() or account
        self._level = min(level, most.served)

    def charge(self, seq: Sequence, cost: float) -> None:
        """Charge the account of ``seq`` more, or less; ``seq.charged`` is the sum."""
        account = self._account_of(seq)
        seq.charged += cost
        account.served += cost
        if account.num_waiting:
            self._enter(account)

    def _enter(self, account: _Account) -> None:
        self._order.push(account.served, account)
        self._reversed.push(-account.served, account)

    def _count(self, seq: Sequence, change: int) -> None:
        tokens = change * len(seq.tokens)
        self.num_tokens += tokens
        requests, before = self.waiting_for(seq.tenant)
        self._by_tenant[seq.tenant] = requests + change, before + tokens
        if requests + change == 0:
            del self._by_tenant[seq.tenant]

    def _name_of(self, seq: Sequence) -> str:
        """The policy is asked once: a request must leave the account that it entered."""
        if seq.account is None:
            seq.account = self._policy.account(seq)
        return seq.account

    def _account_of(self, seq: Sequence) -> _Account:
        name = self._name_of(seq)
        account = self._accounts.get(name)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = _Account(LazyHeap(lambda rank, seq: self._ranks.get(seq.id) == rank))
            account.served = self._level
            self._accounts[name] = account
        return account

    def _sweep(self) -> None:
        """Forget idle accounts below the level, where they would start again, and at least half."""
        idle = sorted(a.served for a in self._accounts.values() if not a.num_waiting)
        gone = max(self._level, idle[len(idle) // 2]) if idle else self._level
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.num_waiting or account.served > gone
        }
        self._sweep_at = len(self._accounts) * 3 // 2 + 64
