"""``asyncllm serve`` with planted faults; it takes the same options.

Steps with a sequence whose tokens include ``POISON`` raise each time. Those of several sequences,
one with a token of ``FLAKY``, raise the first time that the token is met; of a sequence alone, they
do not: it would rightly be blamed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncllm.__main__ import main
from asyncllm.executor.runner import ModelRunner
from asyncllm.wire.messages import unpack

if TYPE_CHECKING:
    from asyncllm.executor.runner import Ticket
    from asyncllm.wire.messages import StepPlan

POISON: Final = 2000
FLAKY: Final = range(2100, 2200)


class Faults:
    """Decides which steps raise."""

    def __init__(self) -> None:
        self._tokens: dict[int, set[int]] = {}  # by slot
        self._met: set[int] = set()

    def hits(self, plan: StepPlan) -> bool:
        for admit in plan.admits:
            self._tokens[admit.slot] = set(np.frombuffer(admit.tokens, "<i4").tolist())
        slots = {int(slot) for slot, _, _ in unpack(plan.rows, 3)}
        tokens = set[int]().union(*(self._tokens[slot] for slot in slots))
        new = (tokens & set(FLAKY)) - self._met if len(slots) > 1 else set()
        self._met |= new
        return POISON in tokens or bool(new)


def plant() -> None:
    faults, launch = Faults(), ModelRunner.launch

    def faulty_launch(runner: Any, plan: StepPlan) -> Ticket:
        if not faults.hits(plan):
            return launch(runner, plan)
        forward = runner._forward
        runner._forward = _fail
        try:
            return launch(runner, plan)
        finally:
            runner._forward = forward

    runner_class: Any = ModelRunner
    runner_class.launch = faulty_launch


def _fail(*_: object) -> None:
    raise RuntimeError("planted")


if __name__ == "__main__":
    plant()
    sys.exit(main(["serve", *sys.argv[1:]]))
