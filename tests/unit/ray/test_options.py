"""Options of the application of Ray Serve: names as in --config, values as text or as they are."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.config.ray_config import RayConfig
from asyncllm.errors import BadRequest
from asyncllm.ray.application import build, read_options


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
