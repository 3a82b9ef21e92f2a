"""The application of Ray Serve: a front, and behind it replicas that grow with the load.

The front chooses among them with ``PrefixRouter``, which knows where prefixes are cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import RequestRouter

from asyncllm.config import EngineConfig
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.ray.relay import Relay
from asyncllm.ray.replica import NUMBER, Replica, desired_replicas
from asyncllm.supervise.front.request import home_of
from asyncllm.supervise.front.router import Placed, Router, blocks, prompt_bytes
from asyncllm.system.suggest import did_you_mean

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
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


#: Requests that Ray Serve passes on at once. A replica queues and refuses by itself.
_ONGOING: Final = 2**16
#: Ray Serve's own log would have lines for each request.
QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}
#: How often a replica is asked whether its engine lives.
_CHECK_SECONDS: Final = 5.0
#: A replica that answers no check for so long, three times in a row, is replaced.
_HANG_SECONDS: Final = 5.0
#: How often a replica that is to end is asked whether its requests have ended.
_DRAIN_CHECK_SECONDS: Final = 0.5
#: Load is averaged over so long; how long it must be too high, or too low, before replicas are
#: started or ended.
_LOOK_BACK_SECONDS: Final = 20.0
_UP_SECONDS: Final = 5.0
_DOWN_SECONDS: Final = 300.0

S = TypeVar("S", bound=msgspec.Struct)


class Front:
    """Where Ray Serve's proxies send requests; it computes next to nothing."""

    def __init__(self, replicas: DeploymentHandle[Replica], server: ServerConfig):
        self._relay = Relay(replicas, server)

    def __serve_build_asgi_app__(self) -> Relay:
        return self._relay


def read_options(args: dict[str, Any]) -> tuple[EngineConfig, ServerConfig, RayConfig]:
    """Options as text or as values, with names as in ``--config``.

    Raises:
        BadRequest: one is wrong, or unknown.
    """
    options = {name.replace("-", "_"): value for name, value in args.items()} | {"ray": True}
    structs = EngineConfig, ServerConfig, RayConfig
    known = [name for struct in structs for name in struct.__struct_fields__]
    for name in options:
        if name not in known:
            raise BadRequest(f"unknown option {name!r}{did_you_mean(name, known)}", param=name)
    return _read(EngineConfig, options), _read(ServerConfig, options), _read(RayConfig, options)


def check(engine: EngineConfig, config: RayConfig) -> None:
    """
    Raises:
        BadRequest: Ray decides what an option says, or the machines cannot share the ranks.
    """
    if engine.dp > 1:
        raise BadRequest("dp: the replicas are Ray's: set replicas", param="dp")
    if engine.device.startswith("cuda:"):
        raise BadRequest(
            f"device must be cuda, not {engine.device}: Ray chooses the GPUs", param="device"
        )
    if engine.tp % config.machines:
        raise BadRequest(
            f"machines ({config.machines}) must divide tp ({engine.tp}): each has as many GPUs",
            param="machines",
        )


def build(engine: EngineConfig, server: ServerConfig, config: RayConfig) -> Application:
    """Raises like ``check``."""
    check(engine, config)
    engine = _placed(engine)
    replicas = serve.deployment(
        Replica,
        max_ongoing_requests=_ONGOING,
        max_constructor_retry_count=1,  # a model that cannot be loaded
        graceful_shutdown_timeout_s=server.drain_seconds,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_SECONDS,
        health_check_period_s=_CHECK_SECONDS,
        health_check_timeout_s=_HANG_SECONDS,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **_resources(engine, config.machines),
        **_scaling(config),
    ).bind(engine, server, config.machines)
    front = serve.deployment(
        serve.ingress()(Front),
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=server.drain_seconds,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_SECONDS,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    )
    return front.bind(replicas, server)


def _read(struct: type[S], options: dict[str, Any]) -> S:
    values = {}
    for field in msgspec.structs.fields(struct):
        if field.name in options:
            value = options[field.name]
            repeats = isinstance(field.default, tuple) and not isinstance(value, list)
            values[field.name] = [value] if repeats else value
    try:
        return msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


def _placed(engine: EngineConfig) -> EngineConfig:
    """With a device that does not depend on the machine that this process runs on."""
    if engine.device != "auto":
        return engine
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return msgspec.structs.replace(engine, device="cuda" if has_gpus else "cpu")


def _resources(engine: EngineConfig, machines: int) -> dict[str, Any]:
    """What a replica takes: as much of each of its machines. Its actor is in the first bundle."""
    ranks, cpus = engine.tp // machines, engine.cpu_threads or 1
    bundle = {"CPU": 1, "GPU": ranks} if engine.gpu == 0 else {"CPU": ranks * cpus}
    actor = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
    if engine.tp == 1:
        return {"ray_actor_options": actor}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [bundle] * machines,
        "placement_group_strategy": "STRICT_PACK" if machines == 1 else "STRICT_SPREAD",
    }


def _scaling(config: RayConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.replicas,
            max_replicas=config.max_replicas,
            look_back_period_s=_LOOK_BACK_SECONDS,
            upscale_delay_s=_UP_SECONDS,
            downscale_delay_s=_DOWN_SECONDS,
            policy=AutoscalingPolicy(policy_function=desired_replicas),
        )
    }
