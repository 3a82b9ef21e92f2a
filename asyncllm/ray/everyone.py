"""What all replicas are asked, and one answer of theirs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ray.serve.exceptions import DeploymentUnavailableError

from asyncllm.errors import NotReady
from asyncllm.server.app import ROUTES
from asyncllm.server.reload import ROUTE as RELOAD
from asyncllm.supervise.front.answers import MERGES, Answer, first
from asyncllm.supervise.front.metrics import labelled
from asyncllm.supervise.front.request import PROBES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray.serve.handle import DeploymentHandle

    from asyncllm.ray.replica import Replica
    from asyncllm.ray.request import Request

_ASKS: Final = {(one.method, one.path): one.asks for one in (*ROUTES, RELOAD) if one.asks}
_NAMED: Final = re.compile(r"/v1/requests/(.+)/(?:trace|abort)")
#: How long all of them may take, asked how they are, or anything else; after that, one is asked.
PROBE_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0

#: Each replica's name, and what it says; None if it says nothing.
Answers = dict[str, Answer | None]


def joined(method: str, path: str) -> Callable[[Answers], Answer | None] | None:
    """How to answer what concerns all replicas; None: one of them answers."""
    known = _ASKS.get(("GET" if method == "HEAD" else method, path))
    if known == "metrics":
        return _metrics
    if known is None and not name_in(path):
        return None
    merge = MERGES[known or "seek"]
    return lambda answers: merge(list(answers.values()))


def name_in(path: str) -> str:
    """Of the request that it is about; empty if it names none."""
    found = _NAMED.fullmatch(path)
    return "" if found is None else found[1]


async def ask_all(replicas: DeploymentHandle[Replica], request: Request) -> Answers | None:
    """None if they take too long, and one can answer as well.

    Raises:
        NotReady: there is none, or those that there are take too long.
    """
    seconds = PROBE_SECONDS if request.path in PROBES else ASK_SECONDS
    try:
        asked = replicas.broadcast("whole_answer", request)
        found: Sequence[tuple[str, Answer] | Exception]
        found = await asked.results_async(timeout_s=seconds, return_exceptions=True)
    except DeploymentUnavailableError:
        raise NotReady("no replica is ready") from None
    except TimeoutError:
        if request.path == RELOAD.path or name_in(request.path):
            raise NotReady("a replica does not answer; try again") from None
        return None
    return dict(
        (f"failed {i}", None) if isinstance(one, Exception) else one for i, one in enumerate(found)
    )


def _metrics(answers: Answers) -> Answer | None:
    known = {name: answer for name, answer in answers.items() if answer is not None}
    if (found := first(list(known.values()))) is None or found.status != 200:
        return found
    text = labelled({name: answer.body.decode() for name, answer in known.items()})
    return found._replace(body=text.encode())
