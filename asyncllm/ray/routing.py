"""PrefixRouter: a request router of Ray Serve's that knows where prefixes are cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ray.serve.request_router import RequestRouter

from asyncllm.ray.replica import NUMBER
from asyncllm.supervise.front.request import home_of
from asyncllm.supervise.front.router import Placed, Router, blocks, prompt_bytes

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica

    from asyncllm.ray.replica import Request

#: Replicas at one time, those that still end included.
MOST_REPLICAS: Final = 1024


class _Choice(NamedTuple):
    """Where a request goes, unless the replica does not take it."""

    replica: ReplicaID
    pending: PendingRequest


class PrefixRouter(RequestRouter):
    """Chooses replicas as ``asyncllm serve --dp`` does: see ``Router``.

    Each front has one, which knows the requests of this front. It runs on the front's event loop.
    """

    def initialize_state(self) -> None:
        """Ray Serve's constructor calls it."""
        self._router = Router(MOST_REPLICAS)
        # ``Router`` knows replicas by number; numbers of those that are gone are used again.
        self._numbers: dict[ReplicaID, int] = {}
        self._unused = list(range(MOST_REPLICAS))
        self._placed: dict[tuple[ReplicaID, str], Placed] = {}
        self._choices: dict[str, _Choice] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica; when that one does not take the request, this is called again."""
        if pending_request is None:
            return [candidate_replicas]
        self._forget_cancelled()
        name = pending_request.metadata.internal_request_id
        refused = self._choices.pop(name, None)
        among = {self._number(replica.replica_id): replica for replica in candidate_replicas}
        if refused is not None:
            self._end(refused.replica, name)
            if len(among) > 1:
                among.pop(self._number(refused.replica), None)
        request: Request = pending_request.args[0]
        home = request.home
        if home is None:
            home = home_of(request.path, request.body)
        if home is not None:  # where the response is that is continued
            there = [
                r.replica_id for r in candidate_replicas if r.replica_metadata.get(NUMBER) == home
            ]
            among = {n: r for n, r in among.items() if r.replica_id in there} or among
        prompt = prompt_bytes(request.body)
        placed = self._router.place(blocks(prompt), len(prompt), among)
        best = among[placed.replica]
        self._choices[name] = _Choice(best.replica_id, pending_request)
        self._placed[best.replica_id, name] = placed
        return [[best]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """The replica has taken the request."""
        self._choices.pop(pending_request.metadata.internal_request_id, None)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has been answered, or not; also called when the replica has not taken it."""
        self._end(replica_id, internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are all there are."""
        super().update_replicas(replicas)
        for replica_id in self._numbers.keys() - {replica.replica_id for replica in replicas}:
            for gone, name in [key for key in self._placed if key[0] == replica_id]:
                self._end(gone, name)
            number = self._numbers.pop(replica_id)
            self._router.forget(number)
            self._unused.append(number)

    def _number(self, replica_id: ReplicaID) -> int:
        if replica_id not in self._numbers:
            self._numbers[replica_id] = self._unused.pop(0)
        return self._numbers[replica_id]

    def _end(self, replica_id: ReplicaID, name: str) -> None:
        placed = self._placed.pop((replica_id, name), None)
        if placed is not None:
            self._router.ended(placed)

    def _forget_cancelled(self) -> None:
        """Of requests whose clients left before a replica was asked, nothing else is heard."""
        for name, choice in list(self._choices.items()):
            if choice.pending.future.cancelled():
                del self._choices[name]
                self._end(choice.replica, name)
