"""The application of Ray Serve: its options, examples/ray.yaml, its port, and how it grows."""

from __future__ import annotations

import errno
import math
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.serve.schema import ServeDeploySchema

from asyncllm.config.ray_config import RayConfig
from asyncllm.errors import BadRequest
from asyncllm.ray import local
from asyncllm.ray.application import build, read_options
from asyncllm.ray.local import hold_port
from asyncllm.ray.replica import LOAD, TARGET, desired_replicas, load
from asyncllm.supervise.listening import bind


def test_options_of_all_kinds_are_read() -> None:
    engine, server, ray = read_options(
        {"model": "some/model", "tp": "2", "max-num-seqs": 8, "api_key": "a", "replicas": 3}
    )
    assert (engine.model, engine.tp, engine.max_num_seqs) == ("some/model", 2, 8)
    assert server.api_key == ("a",)
    assert (ray.replicas, ray.max_replicas, ray.most) == (3, None, 3)


def test_an_option_that_may_be_repeated_takes_a_list() -> None:
    _, server, _ = read_options({"api-key": ["a", "b"]})
    assert server.api_key == ("a", "b")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 8}, "unknown option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"tp": "two"}, r"\$\.tp"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"machines": 0}, "machines must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must not be less than replicas, 3"),
    ],
)
def test_what_is_wrong_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_options(args)


def test_replicas_need_ray() -> None:
    with pytest.raises(BadRequest, match=r"^replicas has no meaning without --ray"):
        RayConfig(replicas=2)
    with pytest.raises(BadRequest, match=r"^max_replicas has no"):
        RayConfig(max_replicas=2)
    with pytest.raises(BadRequest, match=r"^machines has no"):
        RayConfig(machines=2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"device": "cuda:1"}, "device must be cuda, not cuda:1: Ray chooses the GPUs"),
        ({"dp": 2}, "dp: the replicas are Ray's"),
        ({"machines": 2}, r"machines \(2\) must divide tp \(1\)"),
        ({"tp": 3, "machines": "2"}, r"machines \(2\) must divide tp \(3\)"),
    ],
)
def test_what_ray_decides_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        build(*read_options(args))


def replica_of(args: dict[str, Any]) -> Any:
    """The deployment of the replicas, which is bound to the front."""
    front = build(*read_options(args))
    return front._bound_deployment.init_args[0]._bound_deployment


def test_a_replica_asks_for_its_gpus_on_one_machine() -> None:
    actor = {"num_cpus": 1, "num_gpus": 1}
    assert replica_of({"device": "cuda"}).ray_actor_options.items() >= actor.items()
    several = replica_of({"device": "cuda", "tp": 4})._replica_config
    assert several.placement_group_bundles == [{"CPU": 1, "GPU": 4}]
    assert several.placement_group_strategy == "STRICT_PACK"


def test_a_replica_asks_for_as_many_gpus_on_each_of_its_machines() -> None:
    several = replica_of({"device": "cuda", "tp": 4, "machines": 2})
    assert several.ray_actor_options.items() >= {"num_cpus": 1, "num_gpus": 2}.items()
    assert several._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 2}] * 2
    assert several._replica_config.placement_group_strategy == "STRICT_SPREAD"
    cpus = replica_of({"device": "cpu", "tp": 4, "machines": 4, "cpu_threads": 3})._replica_config
    assert cpus.placement_group_bundles == [{"CPU": 3}] * 4


def test_replicas_are_as_many_as_said_or_between_two_numbers() -> None:
    assert replica_of({"device": "cpu", "replicas": 3}).num_replicas == 3
    scaled = replica_of({"device": "cpu", "replicas": 2, "max_replicas": 5})
    config = scaled._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)


EXAMPLE = Path(__file__).parents[3] / "examples" / "ray.yaml"


def test_its_options_and_deployments_exist() -> None:
    config: Any = msgspec.yaml.decode(EXAMPLE.read_bytes())
    ServeDeploySchema.model_validate(config)
    [application] = config["applications"]
    assert application["import_path"] == "asyncllm.ray:app"
    front: Any = build(*read_options(application["args"]))._bound_deployment
    names = {front.name, front.init_args[0]._bound_deployment.name}
    assert {deployment["name"] for deployment in application["deployments"]} <= names


IN_USE = os.strerror(errno.EADDRINUSE)


def as_ray_serve_binds(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    made.listen()
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_held_port_is_ray_serves_alone(host: str) -> None:
    with hold_port(bind(host, 0)) as port:
        # As the system does for whoever takes any port.
        with socket.socket() as other, pytest.raises(OSError, match=IN_USE):
            other.bind(("127.0.0.1", port))
        with as_ray_serve_binds("127.0.0.1", port) as server:
            for _ in range(20):  # all of them: the sockets that hold the port accept nothing
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    server.accept()[0].close()


def test_the_port_is_free_afterwards() -> None:
    with hold_port(bind("127.0.0.1", 0)) as port:
        pass
    for listening in bind("127.0.0.1", port):
        listening.close()


@pytest.mark.parametrize("machines", [1, 2, 3])
def test_machines_that_cannot_come_are_refused(
    machines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"Alive": True}, {"Alive": False}, {"Alive": True}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    local._check_machines(machines, ends_with_us=False)
    assert ("wait until Ray has 3 machines; it has 2" in caplog.text) == (machines == 3)
    refused = pytest.raises(BadRequest, match=r"^machines \(3\): no Ray runs here that has others")
    with refused if machines == 3 else nullcontext():
        local._check_machines(machines, ends_with_us=True)


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        (0, 0, 0.0),
        (64, 0, 0.25),
        (256, 0, 1.0),
        (256, 128, 1.5),
        (20, 20, 2.0),  # the KV cache is full
        (0, 3, 3.0),
    ],
)
def test_load(running: int, waiting: int, expected: float) -> None:
    assert load(running, waiting, max_num_seqs=256) == expected


def wanted(loads: list[float], current: int, target: int | None = None) -> float:
    context: Any = SimpleNamespace(
        aggregated_metrics={LOAD: dict(enumerate(loads))} if loads else {},
        current_num_replicas=current,
        target_num_replicas=current if target is None else target,
    )
    return desired_replicas(context)[0]


def test_replicas_follow_the_load() -> None:
    assert wanted([TARGET, TARGET], 2) == 2
    assert math.ceil(wanted([1.5, 1.5], 2)) == 4
    assert math.ceil(wanted([0.1, 0.1], 2)) == 1


def test_a_replica_that_has_not_reported_counts_like_the_others() -> None:
    assert wanted([TARGET], 3) == pytest.approx(3)


def test_without_reports_nothing_changes() -> None:
    assert wanted([], 2, target=3) == 3
