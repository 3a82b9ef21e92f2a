"""How many replicas there should be, by how full those are that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

#: The load that replicas should have. What is left is for requests that come while another starts.
TARGET: Final = 0.8
#: What replicas report their load as.
LOAD: Final = "load"


def load(running: int, waiting: int, max_num_seqs: int) -> float:
    """How full an engine is: 1 when it can run no more, and more when requests wait.

    While requests wait, the engine runs as many as it can: fewer than ``max_num_seqs`` when the KV
    cache is full.
    """
    most = max(1, running) if waiting else max_num_seqs
    return (running + waiting) / most


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy of Ray Serve's, which itself keeps the limits and waits for the delays."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return context.target_num_replicas, {}
    # Replicas that have not reported yet are as full as the others.
    mean = sum(loads.values()) / len(loads)
    return mean * context.current_num_replicas / TARGET, {}
