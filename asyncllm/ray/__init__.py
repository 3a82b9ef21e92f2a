"""Replicas on several machines: an application of Ray Serve. It needs the extra ``ray``.

``asyncllm serve --ray`` runs it on this machine, and ``serve run asyncllm.ray:app`` on a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """The application, for ``serve run`` and for the ``import_path`` of Ray Serve's files.

    Args:
        args: options of ``asyncllm serve``, as in a file of ``--config``, and those of
            ``RayConfig``.

    Raises:
        BadRequest: an option is wrong, or unknown.
    """
    from asyncllm.ray.application import build, read_options

    return build(*read_options(args))
