"""A model inside an asyncio program: loaded, described, and closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncllm.config import EngineConfig, EngineLimits, PolicyName, engine_config
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import EngineDead, NotReady
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.llm.load import Loaded, load, name_of
from asyncllm.models.spec import ModelSpec
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import SamplingParams
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.validate import check_kind


class ServedModel:
    """Owns everything loaded, from ``start`` to ``aclose``; the base of ``AsyncLLM``."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        policy: Policy | PolicyName | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ):
        """Nothing is loaded yet.

        Args:
            model: folder or hub id; the built-in demo model when None.
            config: the whole configuration, instead of ``model`` and ``options``.
            policy: which request is served next: a policy of your own, or the name of one.
            progress: called from a thread with bytes of weights loaded so far, and in all.
            options: fields of ``EngineConfig``.

        Raises:
            BadRequest: an option has a bad value.
        """
        if isinstance(policy, str):
            options["policy"], policy = policy, None
        check_kind("policy", policy, Policy)
        self.config = config = engine_config(model, config, options)
        self.created = int(time.time())
        self._model_name = name_of(config.model)
        self._policy = policy or POLICIES[config.policy]()
        self._progress = progress
        self._parts: Loaded | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._changing = asyncio.Lock()  # held while loading or closing

    # -- life ------------------------------------------------------------------------------------

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
                self._parts = await load(self.config, self._policy, self._progress)
        return self

    async def aclose(self) -> None:
        """Fail what is unfinished with EngineDead and give all memory back. Idempotent."""
        self._closed = True
        async with self._changing:
            parts, self._parts = self._parts, None
            if parts is not None:
                await parts.aclose()

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
        """Whether requests are served now."""
        return self._parts is not None and self._parts.engine.alive

    @property
    def healthy(self) -> bool:
        """False once the engine has died or was closed; loading counts as healthy."""
        return not self._closed and (self._parts is None or self._parts.engine.alive)

    async def stopped(self) -> str:
        """Wait until a started engine is closed or dead; returns why."""
        return await self._started.engine.stopped()

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
