"""AsyncLLM: a model inside an asyncio program, on which everything else is built."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, cast, overload

from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.requests.mailbox import Mailbox
from asyncllm.engine.token_constraints import is_prepared, prepare
from asyncllm.errors import BadRequest, ContextLengthExceeded
from asyncllm.llm.beam_search import BeamSearch
from asyncllm.llm.embedding import embed
from asyncllm.llm.generation import Batch, Intake, collect, read_request, tenant_of
from asyncllm.llm.served_model import ServedModel
from asyncllm.server_config import ServerConfig
from asyncllm.text.bad_words import bad_word_ids
from asyncllm.types import (
    Completion,
    Prompt,
    SamplingParams,
    SchedulingParams,
    Sink,
    TokenDelta,
    is_chat,
    is_single,
    plain_prompt,
)
from asyncllm.types.beam_search import Beam, BeamSearchParams
from asyncllm.types.embedding import EmbeddingParams, embedding_params
from asyncllm.validate import check_kind

if TYPE_CHECKING:
    import numpy as np
    from aiohttp import web

    from asyncllm.engine.requests.reservations import Reservation


class AsyncLLM(ServedModel):
    """A model served inside this process.

    ::

        async with AsyncLLM("path/or/hub-id") as llm:
            answer = await llm.generate("Once upon a time", SamplingParams(max_tokens=50))
            async for delta in llm.stream([{"role": "user", "content": "Hello"}]):
                print(delta.text, end="")

    It installs no signal handlers, and starts no process but one that compiles missing GPU kernels
    while the model loads; several can live in one process. (Only the number of CPU threads is
    shared by the process.) All methods belong to the event loop it was
    started on. Cancelling a task that awaits ``generate`` or iterates ``stream`` cancels the
    request. Close it: an engine that is only dropped keeps its thread and its memory.
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

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
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
    ) -> BeamSearch:
        """A search that was accepted and is still to be run.

        Args:
            reservation: gives the search its place in the queue, when it is run.

        Raises:
            BadRequest: it can never be served.
            QueueFull: too much is waiting already, and there is no reservation.
        """
        parts = self._own
        return BeamSearch(
            parts.engine, parts.tokenizer, prompt_ids, params, scheduling, reservation
        )

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
        mailbox = Mailbox()
        with self.reserve(tenant=tenant_of(scheduling)) as reservation:
            ids, ready = await read_request(self, prompt, params, reservation)
            request_id = self.submit(ids, ready, mailbox, scheduling, reservation)
        try:
            while True:
                delta = await mailbox.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """Parameters ready to be submitted; grammars are compiled off the loop.

        Raises:
            BadRequest: a constraint is invalid.
        """
        parts = self._own
        if is_prepared(params):
            return params
        words = await bad_word_ids(parts.tokenizer, params.bad_words)
        grammar = None
        if params.grammar is not None:
            grammar = await parts.structured.compile(params.grammar)
        return prepare(params, words, parts.engine.limits, grammar)

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

    # -- text ------------------------------------------------------------------------------------

    async def encode_prompt(
        self, prompt: Prompt, reservation: Reservation | None = None
    ) -> list[int]:
        """Token ids of a prompt in any of its three forms.

        Args:
            reservation: for requests of this prompt. It is told a lower bound of the prompt's
                length before time is spent on tokenizing.

        Raises:
            BadRequest: it is none of the three, or too long.
            QueueFull: a prompt of this length cannot join the queue now.
        """
        plain = plain_prompt(prompt)
        if isinstance(plain, str):
            least = self._least_tokens([plain])
            if reservation is not None:
                reservation.expect(least * reservation.num_requests)
            return await self.encode(plain)
        if is_chat(plain):
            return await self.encode_chat(plain, reservation)
        return cast("list[int]", plain)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises like ``encode_all``."""
        [ids] = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Seq[str], *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[list[int]]:
        """Token ids of each text; off the loop, except for a single short text.

        Raises:
            BadRequest: a text has too many bytes for the context, whatever its tokens are; not with
                ``any_length``.
        """
        if not any_length:
            self._least_tokens(texts)
        return await self._started.tokenizer.encode_async(texts, add_special_tokens)

    def _least_tokens(self, texts: Seq[str]) -> int:
        """A lower bound, from its bytes, for the tokens of the longest text."""
        tokenizer = self._started.tokenizer
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        least = tokenizer.min_tokens(longest)
        if least > self.limits.max_model_len:
            raise ContextLengthExceeded(self.limits.max_model_len, least, at_least=True)
        return least

    async def encode_chat(
        self,
        messages: Seq[dict[str, Any]],
        reservation: Reservation | None = None,
        /,
        *,
        tools: Seq[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        any_length: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of chat messages, rendered with the model's chat template.

        Args:
            reservation: as in ``encode_prompt``.
            any_length: allow more tokens than the context holds.

        Raises:
            BadRequest: the model has no template, or the template refuses the messages.
            QueueFull: the request cannot join the queue now.
        """
        template = self._started.chat_template
        if template is None:
            raise BadRequest(
                f"model {self.model_name} has no chat template; use text prompts",
                param="messages",
            )
        text = await template.render_async(
            list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        if reservation is not None and not any_length:
            reservation.expect(self._least_tokens([text]) * reservation.num_requests)
        # The template writes the special tokens itself.
        [ids] = await self.encode_all([text], add_special_tokens=False, any_length=any_length)
        return ids

    def aiohttp_app(self, server: ServerConfig | None = None) -> web.Application:
        """The HTTP API as an application, for ``app.add_subapp("/llm", llm.aiohttp_app())``.

        Starting and closing the engine stays with the caller.
        """
        from asyncllm.server.app import create_app

        check_kind("server", server, ServerConfig)
        return create_app(self, server or ServerConfig())
