"""What all replicas are asked, and one answer of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ray.serve.exceptions import DeploymentUnavailableError

from asyncllm.errors import NotReady
from asyncllm.front.answers import Answer, first, merger
from asyncllm.front.metrics import labelled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray.serve.handle import DeploymentHandle

    from asyncllm.ray.replica import Replica
    from asyncllm.ray.request import Request

#: How long all of them may take; after that, one is asked.
ASK_SECONDS: Final = 5.0

#: Each replica's name, and what it says; None if it says nothing.
Answers = dict[str, Answer | None]


def joined(method: str, path: str) -> Callable[[Answers], Answer | None] | None:
    """How to answer what concerns all replicas; None: one of them answers."""
    if path == "/metrics" and method in ("GET", "HEAD"):
        return _metrics
    if (merge := merger(method, path)) is None:
        return None
    return lambda answers: merge(list(answers.values()))


async def ask_all(replicas: DeploymentHandle[Replica], request: Request) -> Answers | None:
    """None if they take too long.

    Raises:
        NotReady: there is none.
    """
    try:
        asked = replicas.broadcast("whole_answer", request)
        found: Sequence[tuple[str, Answer] | Exception]
        found = await asked.results_async(timeout_s=ASK_SECONDS, return_exceptions=True)
    except DeploymentUnavailableError:
        raise NotReady("no replica is ready") from None
    except TimeoutError:
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
