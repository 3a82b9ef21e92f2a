"""examples/ray.yaml names what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from ray.serve.schema import ServeDeploySchema

from asyncllm.ray.application import build, read_options

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray.yaml"


def test_its_options_and_deployments_exist() -> None:
    config: Any = msgspec.yaml.decode(EXAMPLE.read_bytes())
    ServeDeploySchema.model_validate(config)
    [application] = config["applications"]
    assert application["import_path"] == "asyncllm.ray:app"
    front: Any = build(*read_options(application["args"]))._bound_deployment
    names = {front.name, front.init_args[0]._bound_deployment.name}
    assert {deployment["name"] for deployment in application["deployments"]} <= names
