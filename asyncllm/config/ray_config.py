"""RayConfig: how many replicas Ray Serve runs, described as ``EngineConfig`` is."""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncllm.config.option_fields import Count, Gpus, doc
from asyncllm.errors import BadRequest
from asyncllm.types.validate import check_fields


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of ``asyncllm serve --ray``, and of ``serve run asyncllm.ray:app``.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    ray: Annotated[
        bool,
        doc(
            "serve through Ray Serve, on the Ray cluster that is already running, or else on one "
            "that is started and ended with the command"
        ),
    ] = False
    replicas: Annotated[
        Count, doc("with --ray: number of servers of the model, each with its own GPUs")
    ] = 1
    max_replicas: Annotated[
        Count | None,
        doc("with --ray: start up to this many replicas while requests wait, and end idle ones"),
    ] = None

    machines: Annotated[
        Gpus,
        doc(
            "with --ray: number of machines that share a replica; each has an equal part of the "
            "GPUs of --tp"
        ),
    ] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for field in msgspec.structs.fields(self):
            if not self.ray and getattr(self, field.name) != field.default:
                name = field.name
                raise BadRequest(f"{name} has no meaning without --ray", param=name)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadRequest(
                f"max_replicas must not be less than replicas, {self.replicas}",
                param="max_replicas",
            )

    @property
    def most(self) -> int:
        """How many replicas there may be."""
        return self.max_replicas or self.replicas
