"""What every handler works with: the model, the configuration, and the requests being served."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from asyncllm.errors import EngineDead, NotFound, NotReady
from asyncllm.server.delivery import Delivery, LiveRequests, Reply, WholeAnswer
from asyncllm.server.protocol import decode, read_body
from asyncllm.server.sse import EventStream
from asyncllm.server.unsupported import refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.api import AsyncLLM
    from asyncllm.config import ServerConfig
    from asyncllm.server.sampling import Job

T = TypeVar("T")


class Service:
    """One per application.

    Attributes:
        live: the requests being served.
        draining: set once, when the server is about to stop: new requests are refused.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig):
        self.llm = llm
        self.config = config
        self.live = LiveRequests()
        self.draining = False

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.llm.model_name,)

    def check_ready(self) -> None:
        """Raise unless new requests are taken now.

        Raises:
            EngineDead, NotReady: with 503.
        """
        if self.draining:
            raise NotReady("the server is shutting down")
        if not self.llm.healthy:
            raise EngineDead("the engine has stopped")
        if not self.llm.ready:
            raise NotReady("the model is still loading")

    async def receive(self, request: web.Request, kind: type[T]) -> T:
        """The body of a generating request, once the server is ready for it.

        Raises:
            EngineDead, NotReady: see ``check_ready``.
            BadRequest, TooLarge: the body is not what the route takes, or asks for what cannot be
                honoured yet.
        """
        self.check_ready()
        body = await read_body(request, self.config.max_body_bytes)
        asked = decode(body, kind)
        refuse_unsupported(body)
        return asked

    def resolve_model(self, asked: str | None) -> str:
        """The name to answer with; naming no model means the first one.

        Raises:
            NotFound: no model of that name is served.
        """
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            raise NotFound(
                f"the model {asked!r} does not exist", param="model", code="model_not_found"
            )
        return asked

    async def answer(
        self, request: web.Request, jobs: Sequence[Job], reply: Reply, *, stream: bool
    ) -> web.StreamResponse:
        """Run the jobs and answer the request; the client's disconnection ends them.

        Raises:
            AsyncLLMError: the engine refused or failed before the first byte.
        """
        self.check_ready()  # again: reading and encoding the prompt took a while
        kind: type[Delivery] = EventStream if stream else WholeAnswer
        delivery = kind(request, reply, len(jobs))
        with self.live.serve(self.llm, delivery, jobs):
            return await delivery.respond()


#: Where handlers find the service: ``request.app[SERVICE]``.
SERVICE = web.AppKey("asyncllm_service", Service)
