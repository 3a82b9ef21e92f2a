"""A model inside an asyncio program: loaded, described, and closed; its texts as tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from asyncllm.config import EngineConfig, EngineLimits, PolicyName
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.engine.requests.view import LiveView
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.vitals import Vitals
from asyncllm.errors import BadRequest, ContextLengthExceeded, EngineDead, NotReady
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.station_messages import Machines
from asyncllm.llm.brief_errors import brief
from asyncllm.llm.compile_ahead import CompileAhead
from asyncllm.llm.load import load, load_replicas, name_of
from asyncllm.llm.loaded import Loaded
from asyncllm.llm.options import engine_config
from asyncllm.models.spec import ModelSpec
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Prompt, SamplingParams, is_chat, plain_prompt
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.types.validate import check_kind


class ServedModel:
    """Owns everything loaded, from ``start`` to ``aclose``; the base of ``AsyncLLM``."""

    @brief
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        policy: Policy | PolicyName | None = None,
        progress: Callable[[int, int], None] | None = None,
        machines: Machines | None = None,
        kernels: CompileAhead | None = None,
        **options: Any,
    ):
        """Nothing is loaded yet.

        Args:
            model: folder or hub id; the built-in demo model when None.
            config: the whole configuration, instead of ``model`` and ``options``.
            policy: which request is served next: a policy of your own, or the name of one.
            progress: called with bytes of weights loaded so far, and in all; from a thread.
            machines: where stations wait that start ranks of ``tp`` on other machines.
            kernels: those of this configuration, if they are being compiled already.
            options: fields of ``EngineConfig``, or vLLM's names for them.

        Raises:
            BadRequest: an option has a bad value.
        """
        if isinstance(policy, str):
            options["policy"], policy = policy, None
        check_kind("policy", policy, Policy)
        self.config = config = engine_config(model, config, options)
        if config.dp > 1 and policy is not None:
            raise BadRequest("dp: replicas take the name of a policy", param="policy")
        self.created = int(time.time())
        self._model_name = name_of(config.model)
        self._policy = policy or POLICIES[config.policy]()
        self._progress = progress
        self._machines = machines
        self._kernels = kernels
        self._parts: Loaded | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._changing = asyncio.Lock()  # held while loading or closing

    # -- life ------------------------------------------------------------------------------------

    @brief
    async def start(self) -> Self:
        """Load the model; returns when it can serve. Does nothing if it is loaded.

        Raises:
            ModelError: the model cannot be found or served; the message says why.
            EngineDead: it has been closed.
        """
        async with self._changing:
            if self._closed:
                raise EngineDead("the engine is closed")
            if self._parts is None:
                self._loop = asyncio.get_running_loop()
                if self.config.dp > 1:
                    self._parts = await load_replicas(self.config)
                else:
                    self._parts = await self._load()
        return self

    async def _load(self) -> Loaded:
        try:
            parts = self._progress, self._machines, self._kernels
            return await load(self.config, self._policy, *parts)
        finally:
            if self._kernels is not None:
                self._kernels.close()

    async def aclose(self) -> None:
        """Fail what is unfinished with EngineDead and give all memory back. Idempotent."""
        self._closed = True
        async with self._changing:
            parts, self._parts = self._parts, None
            if parts is not None:
                await parts.aclose()

    @brief
    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def ready(self) -> bool:
        """Whether requests are served now; with replicas, by one of them at least."""
        return self._parts is not None and self._parts.engine.is_ready

    @property
    def healthy(self) -> bool:
        """False once the engine has died or was closed; loading counts as healthy."""
        return not self._closed and (self._parts is None or self._parts.engine.alive)

    async def stopped(self) -> str:
        """Wait until a started engine is closed or dead; returns why."""
        return await self._started.engine.stopped()

    def give_up(self, cause: str) -> None:
        """A step hangs: fail all requests with EngineDead, and do not wait for it when closing."""
        if self._parts is not None:
            self._parts.engine.abandon()
            self._parts.engine.give_up(cause)

    # -- what is served --------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name for clients: a hub id, the name of a folder, or ``asyncllm-demo``."""
        return self._model_name

    @property
    def spec(self) -> ModelSpec:
        return self._started.spec

    @property
    def limits(self) -> EngineLimits:
        return self._started.engine.limits

    @property
    def tokenizer(self) -> Tokenizer:
        return self._started.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._started.chat_template

    @property
    def chat_reader(self) -> ChatReader:
        """How answers in chats are read."""
        return self._started.chat_reader

    @property
    def stats(self) -> EngineStats:
        return self._started.engine.stats

    def view(self, most: int = 64) -> LiveView:
        """The requests, steps and pages of this moment; of requests about ``most`` of each kind."""
        return self._started.engine.view(most)

    @property
    def vitals(self) -> Vitals | None:
        """What a watchdog may read, from any thread; None while nothing is loaded."""
        parts = self._parts
        return None if parts is None else parts.engine.vitals

    @property
    def startup(self) -> StartupBill:
        """The time of each phase of loading."""
        return self._started.startup

    @property
    def default_params(self) -> SamplingParams:
        """Defaults of requests: those of the model's generation_config.json."""
        return self._started.default_params

    @property
    def default_embedding(self) -> EmbeddingParams:
        """Defaults of embeddings: those of a sentence-transformers folder."""
        return self._started.default_embedding

    @property
    def _started(self) -> Loaded:
        if self._parts is None:
            if self._closed:
                raise EngineDead("the engine is closed")
            raise NotReady("the model is not loaded yet")
        return self._parts

    @property
    def _own(self) -> Loaded:
        """``_started``, for methods that only the loop it was started on may call.

        Raises:
            RuntimeError: another loop is running, or none.
        """
        parts = self._started
        if asyncio._get_running_loop() is not self._loop:
            raise RuntimeError(
                "this AsyncLLM was started on another event loop; use it there, or LLM(...) for "
                "synchronous code"
            )
        return parts

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
        self, texts: Sequence[str], *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[list[int]]:
        """Token ids of each text; off the loop, except for a single short text.

        Raises:
            BadRequest: a text has too many bytes for the context, whatever its tokens are; not with
                ``any_length``.
        """
        if not any_length:
            self._least_tokens(texts)
        return await self._started.tokenizer.encode_async(texts, add_special_tokens)

    def _least_tokens(self, texts: Sequence[str]) -> int:
        """A lower bound, from its bytes, for the tokens of the longest text."""
        tokenizer = self._started.tokenizer
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        least = tokenizer.min_tokens(longest)
        if least > self.limits.max_model_len:
            raise ContextLengthExceeded(self.limits.max_model_len, least, at_least=True)
        return least

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        reservation: Reservation | None = None,
        /,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
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
                f"model {self.model_name} has no chat template; use text prompts", param="messages"
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
