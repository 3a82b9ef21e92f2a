"""Service: the model, the configuration and the live requests, for all handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import msgspec
from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.requests.check import check_ttl
from asyncllm.engine.requests.history import RequestTrace
from asyncllm.errors import BadRequest, EngineDead, NotFound, NotReady
from asyncllm.server.arrivals.forwarding import send_home
from asyncllm.server.chat.large import note_size, read_large
from asyncllm.server.chat.parameters import name_grammar_field, scheduling_params
from asyncllm.server.chat.requests import GeneratingFields, StructureFields
from asyncllm.server.http.bodies import Bodies
from asyncllm.server.http.half_close import expect_answer
from asyncllm.server.http.middleware import RESERVATION, ignored_fields, request_id
from asyncllm.server.http.parse import (
    UNSUPPORTED,
    ignored_header,
    parse,
    refuse_unsupported,
    unknown_fields,
)
from asyncllm.server.http.traffic import Waits
from asyncllm.server.http.turnstile import Turnstile
from asyncllm.server.limits.accounts import ACCOUNT, Accounts, Rates, Work
from asyncllm.server.limits.api_keys import ApiKeys, Key, configured_keys, tenant_of
from asyncllm.server.model import Model
from asyncllm.server.observe.access_log import current_entry
from asyncllm.server.request_log import RequestLog, Served
from asyncllm.server.streaming.delivery import Delivery, Job, Reply, WholeAnswer
from asyncllm.server.streaming.live import LiveRequests
from asyncllm.server.streaming.sse import EventStream
from asyncllm.server.trace import MAX_SEQUENCES, explain
from asyncllm.types import SamplingParams, SchedulingParams
from asyncllm.version import __version__

T = TypeVar("T", bound=msgspec.Struct)


class Service:
    """One per application.

    Attributes:
        keys: the API keys.
        accounts: what they may use in a minute.
        live: the requests being served.
        log: recent requests by name.
        start_waits: how long requests waited to begin.
        bodies: bounds the memory of request bodies.
        draining: set once, when the server is about to stop: new requests are refused.
    """

    def __init__(self, llm: Model, config: ServerConfig, keys: Sequence[Key] | None = None):
        """``keys``: the API keys; those of ``config`` and its file by default."""
        self.llm = llm
        self.config = config
        if keys is None:
            keys = configured_keys(config)
        self.keys = ApiKeys([key.text for key in keys])
        self.accounts = Accounts(self._rates(config, keys))
        self.log = RequestLog()
        self.live = LiveRequests(on_end=self.log.ended)
        self.start_waits = Waits()
        self.bodies = Bodies(max(config.max_bodies_bytes, config.max_body_bytes))
        self.draining = False
        self._turnstile = Turnstile(self.start_waits)

    def _rates(self, config: ServerConfig, keys: Sequence[Key]) -> dict[str, Rates]:
        """By tenant."""
        if not keys:  # all clients are one tenant
            return {"": Rates(config.requests_per_minute, config.tokens_per_minute)}
        return dict(zip(self.keys.tenants, (key.rates for key in keys), strict=True))

    def reconfigure(self, config: ServerConfig, keys: Sequence[Key]) -> None:
        """Go on with other keys and served names; running requests are not disturbed."""
        self.config = config
        self.keys.replace([key.text for key in keys])
        self.accounts.replace(self._rates(config, keys))

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

    async def receive(
        self,
        request: web.Request,
        kind: type[T],
        home: Callable[[web.Request, T], Awaitable[int | None]] | None = None,
    ) -> T:
        """The body of a generating request, which then has one place, ``request[RESERVATION]``.

        Args:
            home: which of several replicas has what the body names; None if any can answer.

        Raises:
            EngineDead, NotReady: see ``check_ready``.
            QueueFull, RateLimited: no request can join the queue, or its API key has used up its
                limits; raised before the body is parsed.
            BadRequest, TooLarge, HttpError: the body is not what the route takes, or wants
                something that is not supported.
            SentHome: another replica answers.
        """
        self.check_ready()
        async with self._read_body(request) as raw:
            # For a prompt of at least one token.
            request[RESERVATION] = self.llm.reserve(tenant=tenant_of(request))
            if (account := self.accounts.of(tenant_of(request))) is not None:
                request[ACCOUNT] = account
                account.admit()
            await self._turnstile.enter(len(raw))
            note_size(len(raw))
            body, fields = await read_large(parse, raw, kind)
            if home is not None:
                send_home(request, await home(request, body), raw)
        expect_answer(request)
        refuse_unsupported(fields)
        unknown = (name for name in unknown_fields(fields, body) if name not in UNSUPPORTED)
        self._note_ignored(unknown)
        return body

    async def read(self, request: web.Request, kind: type[T]) -> T:
        """The body of any other request. Raises like ``receive``, except QueueFull."""
        self.check_ready()
        async with self._read_body(request) as raw:
            await self._turnstile.enter(len(raw))
            note_size(len(raw))
            body, fields = await read_large(parse, raw, kind)
        self._note_ignored(unknown_fields(fields, body))
        return body

    def _read_body(self, request: web.Request) -> AbstractAsyncContextManager[bytearray]:
        config = self.config
        return self.bodies.read(request, config.max_body_bytes, config.request_seconds)

    def scheduling(self, request: web.Request, body: GeneratingFields) -> SchedulingParams:
        """The request's parameters.

        Raises:
            BadRequest: a value is out of range.
        """
        tenant, isolated = tenant_of(request), self.config.isolate_keys
        scheduling = scheduling_params(body, tenant, isolated=isolated)
        check_ttl(scheduling, self.llm.limits)
        return scheduling

    def _note_ignored(self, unknown: Iterator[str]) -> None:
        """List the fields in the X-Ignored-Parameters header.

        Raises:
            BadRequest: there is an unknown one, and the server is strict.
        """
        if self.config.strict and (name := next(unknown, None)) is not None:
            raise BadRequest(f"unknown parameter: {name}", param=name, code="unknown_parameter")
        self.note_ineffective(unknown)

    def note_ineffective(self, names: Iterable[str]) -> None:
        """Add fields that are known but have no effect to X-Ignored-Parameters."""
        if new := ignored_header(names):
            known = ignored_fields.get(None)
            ignored_fields.set(f"{known}, {new}" if known else new)

    def resolve_model(self, wanted: str | None) -> str:
        """The model's name in the answer; the first one, if the request names none.

        Raises:
            NotFound: no model of that name is served.
        """
        name = wanted or self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"the model {name!r} does not exist; this server has {served}"
            raise NotFound(message, param="model", code="model_not_found")
        if (entry := current_entry()) is not None:
            entry.model = name
        return name

    @property
    def fingerprint(self) -> str | None:
        """The ``system_fingerprint`` of answers whose bits do not depend on other requests; None
        where they do. Another version or number of GPUs gives other bits."""
        config = self.llm.config
        if not config.deterministic:
            return None
        return f"asyncllm-{__version__}-deterministic-tp{config.tp}"

    async def answer(
        self,
        request: web.Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        scheduling: SchedulingParams,
        reply: Reply,
        body: GeneratingFields,
        n: int = 1,
    ) -> web.StreamResponse:
        """Run the sequences and answer the request; they end if the client disconnects.

        Raises:
            BadRequest: as ``jobs``.
            AsyncLLMError: the engine refused or failed before the first byte.
        """
        jobs = await self.jobs(prompts, params, scheduling, body, n)
        self.check_ready()  # again: reading and encoding the prompt took a while
        kind: type[EventStream | WholeAnswer] = EventStream if body.stream else WholeAnswer
        delivery = kind(request, reply, len(jobs))
        async with self.serve(request, delivery, jobs) as served:
            self.name(served, reply, tenant_of(request))
            if body.trace:
                reply.explain = lambda: explain(self.traces(served))
            return await delivery.respond()

    async def jobs(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        scheduling: SchedulingParams,
        body: StructureFields,
        n: int = 1,
    ) -> list[Job]:
        """``n`` sequences for each prompt, in OpenAI's order: choice ``i * n + j``.

        Raises:
            BadRequest: the parameters cannot be prepared; ``param`` is the field of ``body``.
        """
        try:
            params = await self.llm.prepare(params)
        except BadRequest as error:
            name_grammar_field(error, body)
            raise
        variants = [_variant(params, j) for j in range(n)]
        return [Job(ids, variant, scheduling) for ids in prompts for variant in variants]

    @asynccontextmanager
    async def serve(
        self,
        request: web.Request,
        delivery: Delivery,
        jobs: Sequence[Job],
        work: Work | None = None,
    ) -> AsyncIterator[Served]:
        """``LiveRequests.serve``, charged to the request's account.

        Args:
            work: what is charged at most; that of the jobs by default.

        Raises:
            RateLimited: the API key has used up its tokens.
            AsyncLLMError: as ``LiveRequests.serve``.
        """
        account, used = request.get(ACCOUNT), 0
        if work is None:
            work = Work.of((job.prompt_ids, job.params) for job in jobs)
        reserved = 0 if account is None else account.reserve(work)
        try:
            async with self.live.serve(self.llm, delivery, jobs, request[RESERVATION]) as served:
                used = work.prompt_tokens
                yield served
        finally:
            if account is not None:
                account.settle(reserved, used + delivery.num_generated)

    def name(self, served: Served, reply: Reply, tenant: str) -> None:
        """Make this task's request known by its X-Request-Id and by the id of its answer."""
        self.log.add(tenant, (request_id.get(), reply.id), served)

    def find(self, request: web.Request) -> Served | None:
        """The request named in the path, if it is of the same tenant and not forgotten."""
        return self.log.find(tenant_of(request), request.match_info["id"])

    def traces(self, served: Served) -> list[tuple[int, RequestTrace]]:
        """The engine's traces of a request's first sequences, each with the index of its choice."""
        traces = ((i, self.llm.trace(id)) for i, id in enumerate(served.engine_ids[:MAX_SEQUENCES]))
        return [(i, trace) for i, trace in traces if trace is not None]


def _variant(params: SamplingParams, j: int) -> SamplingParams:
    """Answers need different seeds to differ; the first one alone scores the prompt."""
    seed = params.seed
    if j == 0 or (seed is None and params.prompt_logprobs is None):
        return params
    if seed is not None:
        seed = (seed + j + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)


#: Handlers find the service in ``request.app[SERVICE]``.
SERVICE = web.AppKey("asyncllm_service", Service)
