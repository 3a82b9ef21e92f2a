"""A load on the simulated device."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import Policy
from asyncllm.executor.sim.cost import SimCost
from asyncllm.lab.replay.figures import Figures
from asyncllm.lab.replay.simulate import Device, Simulation
from tools.bench_policies.load import Load


def serve(
    load: Load,
    limits: EngineLimits,
    cost: SimCost,
    policy: Policy,
    ended: Callable[[int], None] | None = None,
) -> Figures:
    """Serve a load on the simulated device, as fast as ``cost`` says.

    Deadlines are kept as the engine does it. Nobody is refused because too many wait.

    Args:
        ended: called with the number of requests that have ended, now and then.

    Raises:
        BadRequest: the load does not suit the limits.
    """
    device = Device(
        lambda step, rows: cost.timing(
            step, rows.starts, rows.lengths, rows.num_samples, rows.decode_steps
        ),
        lambda count: cost.copy_seconds(count, limits.page_size),
    )
    workload = load.workload(limits)
    lengths = {id: r.num_prompt + r.num_output for id, r in enumerate(load.requests)}
    simulation = Simulation(
        workload, limits, policy, device, lengths=lengths, enforce_deadlines=True
    )
    return simulation.run(ended)
