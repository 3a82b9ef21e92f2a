"""Why a request waits."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

#: What a waiting request waits for:
#:
#: - slots: all slots are taken
#: - pages: more KV pages than there are
#: - budget: room in a step for its prompt
#: - step: the next plan, which comes with the end of a step under way
#: - prefix: another request is computing a prefix of its prompt
#: - host: pages of its prefix are being copied back from the host's memory
#: - preempted: it lost its pages, and a step under way still has a row of it
#: - trial: requests of a failed step, which run again first
#: - deadline: nothing any more, as its deadline can no longer be met
Reason: TypeAlias = Literal[
    "slots", "pages", "budget", "step", "prefix", "host", "preempted", "trial", "deadline"
]


class Wait(NamedTuple):
    """Why a request waits, as of the last plan.

    The first three reasons are those of the queue's head; a request behind it waits for them too,
    and for the requests ``ahead`` of it.

    Attributes:
        ahead: requests with the same key that come before it, about.
        needs, available: pages that it is expected to need, and that a newcomer may take.
        page: of a ``prefix``, the page that it waits for; -1 otherwise.
        prefix_pages: how many pages that prefix has.
    """

    reason: Reason
    ahead: int = 0
    needs: int = 0
    available: int = 0
    page: int = -1
    prefix_pages: int = 0
