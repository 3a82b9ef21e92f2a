"""AsyncLLM: a model inside an asyncio program, on which everything else is built."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, overload

from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.requests.mailbox import Mailbox
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import BadRequest
from asyncllm.llm.brief_errors import BRIEF, brief, shorten
from asyncllm.llm.generation import Batch, Intake, collect, embed, read_request, tenant_of
from asyncllm.llm.served_model import ServedModel
from asyncllm.types import (
    Completion,
    Prompt,
    SamplingParams,
    SchedulingParams,
    Sink,
    TokenDelta,
    is_single,
)
from asyncllm.types.beam_search import Beam, BeamSearchParams, Search
from asyncllm.types.embedding import EmbeddingParams, embedding_params
from asyncllm.types.validate import check_kind

if TYPE_CHECKING:
    import httpx2
    import numpy as np
    from aiohttp import web

    from asyncllm.server.embedded.asgi import AsgiApp


class AsyncLLM(ServedModel):
    """A model served inside this process.

    ::

        async with AsyncLLM("path/or/hub-id") as llm:
            answer = await llm.generate("Once upon a time", SamplingParams(max_tokens=50))
            async for delta in llm.stream([{"role": "user", "content": "Hello"}]):
                print(delta.text, end="")

    It installs no signal handlers, and starts no process but one that compiles missing GPU kernels
    while the model loads, and those of ranks (``tp``) and of replicas (``dp``, which do all but the
    methods under "HTTP" below). Several can live in one process, and share only its number of CPU
    threads. All methods belong to the event loop it was started on. Cancelling a task that awaits
    ``generate`` or iterates ``stream`` cancels the request. Close it: an engine that is only
    dropped keeps its thread and its memory.
    """

    # -- generation ------------------------------------------------------------------------------

    # A str is also a sequence of prompts; as in the code, the first signature that fits counts.
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> list[Completion]: ...
    @brief
    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Completion | list[Completion]:
        """The whole answer to a prompt; of a list of prompts, the answers in their order.

        A list is scheduled together, and waits for room in the queue where a single prompt is
        refused. The first prompt that fails cancels the others and raises its error; cancelling
        the call cancels all.

        Args:
            prompts: text, token ids or chat messages; or a list of these.
            params: for all prompts, or a list with one for each; the model's own defaults when
                None. Without ``max_tokens``, a chat may fill the context; an answer to text or
                token ids ends after 256 tokens, with ``finish_reason`` "length".
            scheduling: for all prompts.

        Raises:
            BadRequest: the request can never be served, or an argument is of the wrong type; in a
                list, the message starts with the index of the prompt.
            QueueFull: too many are waiting.
            DeadlineExceeded: it could not be served in time.
            StepError, EngineDead: it failed while running.
        """
        if not is_single(prompts):
            return await Batch(prompts, params, scheduling).run(self, Intake(self))
        with self.reserve(tenant=tenant_of(scheduling)) as reservation:
            ids, ready = await read_request(self, prompts, params, reservation)
            return await collect(self, ids, ready, scheduling, reservation)

    @brief
    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, scheduling: SchedulingParams | None = None
    ) -> list[Beam]:
        """The likeliest continuations of a prompt, best first. Raises like ``generate``."""
        check_kind("params", params, BeamSearchParams)
        with self.reserve(tenant=tenant_of(scheduling)) as reservation:
            ids = await self.encode_prompt(prompt, reservation)
            return await self.start_beam_search(ids, params, scheduling, reservation).run()

    def start_beam_search(
        self,
        prompt_ids: Seq[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> Search:
        """A search that was accepted and is still to be run.

        Args:
            reservation: gives the search its place in the queue, when it is run.

        Raises:
            BadRequest: it can never be served.
            QueueFull: too much is waiting already, and there is no reservation.
        """
        return self._own.engine.search(prompt_ids, params, scheduling, reservation)

    @brief
    async def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        params: EmbeddingParams | None = None,
        scheduling: SchedulingParams | None = None,
        **options: Any,
    ) -> np.ndarray:
        """The vector of a prompt, float32 [dimensions]; of a list, [prompts, dimensions].

        Args:
            options: fields of ``EmbeddingParams``, instead of ``params``; those that are not given
                are as in ``default_embedding``.

        Raises:
            BadRequest, QueueFull, ...: as ``generate`` does; of a list, nothing is left behind.
        """
        check_kind("scheduling", scheduling, SchedulingParams)
        wanted = embedding_params(params, options, self.default_embedding)
        return await embed(self, prompts, wanted, scheduling)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """The answer as it grows; the last delta has a ``finish_reason``.

        A slow reader gets several tokens at once; nothing piles up. It ends and raises like
        ``generate``.
        """
        mailbox, request_id = Mailbox(), None
        try:
            with self.reserve(tenant=tenant_of(scheduling)) as reservation:
                ids, ready = await read_request(self, prompt, params, reservation)
                request_id = self.submit(ids, ready, mailbox, scheduling, reservation)
            while True:
                delta = await mailbox.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        except BRIEF as error:
            shorten(error)
            raise
        finally:
            if request_id is not None:
                self.abort(request_id)

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """Parameters ready to be submitted; grammars are compiled off the loop.

        Raises:
            BadRequest: a constraint is invalid.
        """
        return await self._own.engine.prepare(params)

    def submit(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> int:
        """Queue a request whose output goes to ``sink``; see ``Engine.add``.

        Args:
            params: as ``prepare`` returns them.
            reservation: gives the request its place in the queue.
        """
        return self._own.engine.add(prompt_ids, params, sink, scheduling, reservation=reservation)

    def reserve(self, num_tokens: int = 1, num_requests: int = 1, tenant: str = "") -> Reservation:
        """Reserve places in the queue, for prompts of at least ``num_tokens`` in all.

        A context manager: leaving it gives back the places that no request has taken.

        Raises:
            QueueFull: there is no room now; ``retry_after`` says when.
        """
        return self._own.engine.reservations.make(num_tokens, num_requests, tenant)

    @property
    def num_reserved(self) -> int:
        """Reserved places in the queue."""
        return self._started.engine.reservations.num_requests

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        """What happened to a request, by the id that ``submit`` gave; None when it is forgotten.

        Args:
            steps: include the steps that ran meanwhile.
        """
        return self._started.engine.trace(request_id, steps=steps)

    def abort(self, request_id: int) -> None:
        """Drop a request; idempotent, also after ``aclose``."""
        if self._parts is not None:
            self._parts.engine.abort(request_id)

    # -- HTTP ------------------------------------------------------------------------------------

    def aiohttp_app(self, server: ServerConfig | None = None) -> web.Application:
        """The HTTP API as an application, for ``app.add_subapp("/llm", llm.aiohttp_app())``.

        Starting and closing the engine stays with the caller.
        """
        from asyncllm.server.app import create_app

        return create_app(self, self.checked(server))

    def asgi_app(self, server: ServerConfig | None = None) -> AsgiApp:
        """The HTTP API for ASGI, as in ``app.mount("/llm", llm.asgi_app())`` of FastAPI.

        Mounted, it leaves starting and closing the engine to the caller. Served by itself, as with
        ``uvicorn module:app``, it does both. Host and port of ``server`` have no effect.
        """
        from asyncllm.server.embedded.asgi import AsgiApp
        from asyncllm.server.embedded.exchange import InProcess

        return AsgiApp(self, InProcess(self, self.checked(server)))

    def httpx_client(self, server: ServerConfig | None = None) -> httpx2.AsyncClient:
        """A client of the HTTP API without a socket: ``AsyncOpenAI(http_client=...)`` takes it.

        It belongs to the event loop that the engine was started on. ``await client.aclose()``
        ends its requests.
        """
        from asyncllm.server.embedded.exchange import InProcess
        from asyncllm.server.embedded.httpx_transport import async_client

        return async_client(InProcess(self, self.checked(server)))

    def checked(self, server: ServerConfig | None) -> ServerConfig:
        """The configuration of an HTTP API of this model, the defaults for None.

        Raises:
            BadRequest: it is of another type, or the model has replicas.
        """
        check_kind("server", server, ServerConfig)
        if self.config.dp > 1:
            raise BadRequest("dp: replicas have no HTTP API here; use asyncllm serve", param="dp")
        return server or ServerConfig()
