"""Loads: requests to simulate that no scheduler has recorded, and a simulation of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import Policy
from asyncllm.engine.recording.trace_file import NEW_ROOT, Arrival
from asyncllm.engine.scheduling.sequence import FOREVER
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.cost import SimCost
from asyncllm.lab.replay.figures import Figures
from asyncllm.lab.replay.simulate import Device, Simulation
from asyncllm.lab.replay.workload import Workload


class LoadRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.

    Attributes:
        arrival: seconds.
        blocks: the contents of its prompt's blocks of ``Load.block_tokens``, the last one may be
            partial; the rest of the prompt is like no other.
        group: a name for requests whose figures are wanted apart.
        deadline: seconds after the arrival.
    """

    arrival: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    group: str = ""
    deadline: float = FOREVER


class Load(msgspec.Struct, frozen=True):
    """One or more requests, in order of arrival.

    Attributes:
        skipped: how many rows of the file were left out, by reason.
    """

    name: str
    requests: list[LoadRequest]
    block_tokens: int = 512
    skipped: dict[str, int] = {}

    def select(
        self,
        *,
        longest: int,
        speed: float = 1.0,
        seconds: float = FOREVER,
        first: int | None = None,
    ) -> Load:
        """The first requests of the first ``seconds``, without those over ``longest`` tokens.

        They arrive ``speed`` times as fast, from 0 s on; ``seconds`` are counted before that.

        Raises:
            BadRequest: none is left.
        """
        origin = self.requests[0].arrival
        chosen = [r for r in self.requests[:first] if r.arrival - origin <= seconds]
        kept = [
            msgspec.structs.replace(r, arrival=(r.arrival - origin) / speed)
            for r in chosen
            if r.num_prompt + r.num_output <= longest
        ]
        if not kept:
            raise BadRequest(f"{self.name} has no request of at most {longest:,} tokens")
        skipped = dict(self.skipped)
        if len(kept) < len(chosen):
            skipped[f"longer than {longest:,} tokens"] = len(chosen) - len(kept)
        return msgspec.structs.replace(self, requests=kept, skipped=skipped)

    def workload(self, limits: EngineLimits) -> Workload:
        """These requests for a scheduler with these limits; ids are places in ``requests``.

        Outputs may become as long as the context: the scheduler is not told where they end.

        Raises:
            BadRequest: a request is too long, or pages do not fit in the blocks.
        """
        longest = max(request.num_prompt + request.num_output for request in self.requests)
        if longest > limits.max_model_len:
            raise BadRequest(
                f"{self.name} has a request of {longest:,} tokens, and the context is of "
                f"{limits.max_model_len:,}"
            )
        workload = Workload(limits.page_size)
        paths = self._paths(workload, limits.page_size)
        for id, (request, (node, _)) in enumerate(zip(self.requests, paths, strict=True)):
            deadline = request.arrival + request.deadline
            event = Arrival(
                now=request.arrival,
                id=id,
                tenant="",
                node=node,
                new_pages=0,
                num_prompt=request.num_prompt,
                max_length=limits.max_model_len,
                priority=0,
                surely_full=False,
                arrival=None,
                deadline=deadline if deadline < FOREVER else None,
            )
            workload.add(event, "", node, request.group)
        workload.fill()
        return workload

    def cached(self, page_size: int) -> list[int]:
        """Of each prompt, the tokens that all earlier ones leave in a cache without end."""
        return [cached for _, cached in self._paths(Workload(page_size), page_size)]

    def _paths(self, workload: Workload, page_size: int) -> list[tuple[int, int]]:
        """The last page of each prompt's blocks, and the tokens in pages of earlier prompts.

        As in the prefix cache, the token that the first output follows is always computed.
        """
        if self.block_tokens % page_size:
            raise BadRequest(
                f"{self.name}: blocks of {self.block_tokens} tokens are no multiple of the page "
                f"size of {page_size}"
            )
        pages, block_pages = workload.pages, self.block_tokens // page_size
        root = pages.add(NEW_ROOT, 0)
        blocks: dict[tuple[int, int], int] = {}  # last node by (last node before it, content)
        filled: dict[int, int] = {}  # pages of a block that some prompt had, by its last node
        paths: list[tuple[int, int]] = []
        for request in self.requests:
            node, left, cached, shared = root, request.num_prompt // page_size, 0, True
            for content in request.blocks:
                count = min(left, block_pages)
                if not count:
                    break
                end = blocks.get((node, content))
                if end is None:
                    end = blocks[node, content] = pages.add(node, block_pages)
                known = min(filled.get(end, 0), count)
                filled[end] = max(filled.get(end, 0), count)
                cached += known if shared else 0
                shared = shared and known == block_pages
                left -= count
                node = end - block_pages + count  # within a partial block, which is the last
            cached = min(cached, (request.num_prompt - 1) // page_size)
            paths.append((node, cached * page_size))
        return paths


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
