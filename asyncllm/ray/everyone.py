"""What all replicas are asked, and one answer of theirs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from ray.serve.exceptions import DeploymentUnavailableError

from asyncllm.errors import NotReady
from asyncllm.server.app import ROUTES
from asyncllm.server.reload import ROUTE as RELOAD
from asyncllm.supervise.front.answers import MERGES, Answer, first
from asyncllm.supervise.front.metrics import labelled
from asyncllm.supervise.front.request import PROBES, home_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray.serve.handle import DeploymentHandle

    from asyncllm.ray.replica import Replica
    from asyncllm.ray.request import Request

_ASKS: Final = {(one.method, one.path): one.asks for one in (*ROUTES, RELOAD) if one.asks}
_NAMED: Final = re.compile(r"/v1/requests/(.+)/(?:trace|abort)")
_RESPONSES: Final = frozenset(("/v1/responses", "/v1/responses/compact"))
#: How long all of them may take, asked how they are, or anything else; after that, one is asked.
PROBE_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0

#: Each replica's name, and what it says; None if it says nothing.
Answers = dict[str, Answer | None]


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


class _Body(msgspec.Struct):
    """Of a response: what says which replica has what it continues."""

    input: list[_Item]


_BODY: Final = msgspec.json.Decoder(_Body)


def joined(method: str, path: str, name: str) -> Callable[[Answers], Answer | None] | None:
    """How to answer what concerns all replicas; None: one of them answers.

    Args:
        name: of what only one of them has, see ``name_in``.
    """
    known = _ASKS.get(("GET" if method == "HEAD" else method, path))
    if known == "metrics":
        return _metrics
    if known is None and not name:
        return None
    merge = MERGES[known or "seek"]
    return lambda answers: merge(list(answers.values()))


def name_in(request: Request) -> str:
    """Of another request, or of an item of a response; empty if the request names none.

    Items that replicas have named themselves say where they are, see ``home_of``.
    """
    found = _NAMED.fullmatch(request.path)
    if found is not None:
        return found[1]
    if request.path not in _RESPONSES or home_of(request.path, request.body) is not None:
        return ""
    try:
        items = _BODY.decode(request.body).input
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # a text, or what the replica refuses
    referred = (
        one.id for one in items if one.type in ("item_reference", None) and one.role is None
    )
    return min((id for id in referred if isinstance(id, str)), default="")


async def ask_all(
    replicas: DeploymentHandle[Replica], request: Request, name: str
) -> Answers | None:
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
        if request.path == RELOAD.path or name:
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
