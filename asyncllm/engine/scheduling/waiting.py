"""The waiting queue: in a policy's order, with equal shares for its accounts."""

from __future__ import annotations

from collections.abc import Iterator

from asyncllm.cache.lazy_heap import LazyHeap
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.sequence import Sequence

#: A generated token costs as much as so many prompt tokens (Sheng et al., OSDI 2024).
OUTPUT_COST = 2.0


class _Account:
    """``served`` is what it has been charged; ``queue`` its waiting requests, by rank."""

    __slots__ = ("num_waiting", "queue", "served")

    def __init__(self, queue: LazyHeap[Sequence]):
        self.queue = queue
        self.num_waiting = 0
        self.served = 0.0


class WaitingQueue:
    """Who comes next: of the account that has been served least, the request of smallest rank.

    Every operation is O(log n) in the number waiting. An account that comes back after having had
    nothing to ask for starts at the level of the one that had its turn last, before that was
    charged (start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM 1996): idle time is no credit,
    and what the others were charged in advance is no debt.
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
        """``seq`` waits from now on."""
        rank = self._policy.rank(seq, len(seq.tokens))
        account = self._account_of(seq)
        # Before they enter the heaps, which keep nothing but what counts.
        self._ranks[seq.id] = rank
        account.num_waiting += 1
        if account.num_waiting == 1:
            self._num_active += 1
            account.served = max(account.served, self._level)
            self._enter(account)
        account.queue.push(rank, seq)
        self._count(seq, 1)

    def ahead_of(self, seq: Sequence) -> tuple[int, int]:
        """Requests of its account, and their tokens, that would come before a newcomer.

        O(n) in the number waiting.
        """
        rank = self._policy.rank(seq, len(seq.tokens))
        account = self._accounts.get(self._name_of(seq))
        if account is None:
            return 0, 0
        ahead = {other.id: len(other.tokens) for place, other in account.queue if place <= rank}
        return len(ahead), sum(ahead.values())

    def served(self, seq: Sequence) -> float:
        """What the account of ``seq`` has been charged; the one with the least comes first."""
        account = self._accounts.get(self._name_of(seq))
        return self._level if account is None else account.served

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        """Requests that wait on behalf of a tenant, and their tokens."""
        return self._by_tenant.get(tenant, (0, 0))

    def peek(self) -> Sequence | None:
        """Whose turn it is; None when nobody waits."""
        account = self._order.peek()
        return None if account is None else account.queue.peek()

    def remove(self, seq: Sequence) -> None:
        """``seq`` does not wait any more."""
        del self._ranks[seq.id]
        account = self._account_of(seq)
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._num_active -= 1
            account.queue.clear()
        self._count(seq, -1)

    def serve(self, seq: Sequence, cost: float) -> None:
        """It was the turn of ``seq``, which will cost its account so much."""
        account = self._account_of(seq)
        level = account.served
        if self._num_active > 1 or len(self) == 1:
            # Those who come now and then must not go before the others for ever.
            level = max(level, self._level + self._last_cost / self._num_active)
        self._last_cost = cost
        self.charge(seq, cost)
        self.remove(seq)
        # But nobody starts behind all others, for charges in advance that will be taken back.
        most = self._reversed.peek() or account
        self._level = min(level, most.served)

    def charge(self, seq: Sequence, cost: float) -> None:
        """Correct what its account has paid for ``seq``; in all, that is ``seq.charged``."""
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
        """The policy is asked once: what is entered in an account must leave the same one."""
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
        """Forget accounts that would begin level anyway, and half of the idle ones in any case."""
        idle = sorted(a.served for a in self._accounts.values() if not a.num_waiting)
        gone = max(self._level, idle[len(idle) // 2]) if idle else self._level
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.num_waiting or account.served > gone
        }
        self._sweep_at = len(self._accounts) * 3 // 2 + 64
