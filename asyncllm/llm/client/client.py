"""Client: the ``generate`` and ``stream`` of AsyncLLM against a server elsewhere."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import aiohttp
import msgspec

from asyncllm.errors import AsyncLLMError, BadRequest, NotFound
from asyncllm.llm.client import answers
from asyncllm.llm.client.request_fields import changed_fields, sampling_fields, scheduling_fields
from asyncllm.types import (
    Completion,
    Prompt,
    SamplingParams,
    SchedulingParams,
    TokenDelta,
    is_chat,
    is_single,
    plain_prompt,
)
from asyncllm.types.embedding import EmbeddingParams, embedding_params
from asyncllm.types.sampling_defaults import default_max_tokens
from asyncllm.types.validate import check_kind

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Client:
    """A model on ``asyncllm serve``, vLLM, or another server that takes the same requests.

    ::

        async with Client("http://localhost:8000") as llm:
            answer = await llm.generate("Once upon a time", SamplingParams(max_tokens=50))
            async for delta in llm.stream([{"role": "user", "content": "Hello"}]):
                print(delta.text, end="")

    What comes back equals what ``AsyncLLM`` returns, save that a logprob of minus infinity is
    -9999, that ``TokenLogprob.top`` is empty where a server tells alternatives by their texts only,
    and that a chat's answer is its content, without the reasoning and the tool calls that the
    server finds in it. Without ``params`` the server's defaults hold: for text and token ids these
    are OpenAI's 16 tokens.

    Some parameters cannot be sent, and are refused by name when they ask for anything:
    ``reasoning`` and ``shown_special_tokens``, which servers work out from the chat template, a
    ``grammar`` of structural tags that are not simply among free text, ``max_tokens`` 0 in chats,
    and ``SchedulingParams.tenant``, as a server tells tenants by their API keys.

    Cancelling a task that awaits ``generate`` or iterates ``stream`` closes its connection, which
    cancels the request. Close the client with ``async with`` or ``aclose()``.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ):
        """Nothing is connected yet.

        Args:
            base_url: where the server is, with or without ``/v1``.
            api_key: sent as a bearer token.
            model: which of the server's models to use; its first one when None.
            timeout: most seconds to wait for a connection, and for the next bytes of an answer.

        Raises:
            BadRequest: ``base_url`` is no HTTP URL.
        """
        if not base_url.startswith(("http://", "https://")):
            raise BadRequest(f"{base_url!r} does not start with http://", param="base_url")
        self._base = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        self._name = model
        self._model: answers.Model | None = None
        self._asking_model = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Completion:
        """The whole answer to one prompt: text, token ids, or chat messages.

        Raises:
            BadRequest, Unauthorized, NotFound, TooLarge: the server refuses the request.
            QueueFull, NotReady: it cannot take it now.
            DeadlineExceeded: it could not answer in time.
            EngineDead, AsyncLLMError: it failed.
            ConnectionError: the server cannot be reached, or hung up.
            TimeoutError: nothing came for ``timeout`` seconds.
        """
        path, body = await self._body(prompt, params, scheduling)
        answer = await self._fetch(answers.Answer, "POST", path, body)
        delta = answer.to_delta(params)
        if delta.finish_reason is None:
            raise AsyncLLMError("the server's answer has no finished choice")
        return Completion(
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=delta.logprobs,
            usage=answer.to_usage(),
            prompt_logprobs=delta.prompt_logprobs,
        )

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: EmbeddingParams | None = None,
        scheduling: SchedulingParams | None = None,
        **options: Any,
    ) -> np.ndarray:
        """The vector of a prompt, float32 [dimensions]; of a list, [prompts, dimensions].

        Prompts are either all texts or all token ids. The server chooses what ``params`` leave at
        the defaults. Raises like ``generate``.

        Args:
            options: fields of ``EmbeddingParams``, instead of ``params``.
        """
        import numpy as np

        wanted = embedding_params(params, options, EmbeddingParams())
        single = is_single(prompts)
        each = cast("Sequence[Prompt]", [prompts] if single else prompts)
        plain = [plain_prompt(prompt) for prompt in each]
        if any(map(is_chat, plain)):
            raise BadRequest("servers take no chats for embeddings", param="prompt")
        if not plain:
            return np.empty((0, 0), dtype=np.float32)
        body = {
            "model": self._name or (await self._served_model()).id,
            "input": plain,
            "encoding_format": "base64",
            **changed_fields(wanted),
            **scheduling_fields(scheduling or SchedulingParams()),
        }
        answer = await self._fetch(answers.EmbeddingList, "POST", "/v1/embeddings", body)
        if len(answer.data) != len(plain):
            raise AsyncLLMError("the server's answer has not one vector for each prompt")
        ordered = sorted(answer.data, key=attrgetter("index"))
        vectors = [np.frombuffer(b64decode(entry.embedding), "<f4") for entry in ordered]
        return np.stack(vectors)[0 if single else slice(None)]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """The answer as it grows; the last delta has a ``finish_reason``.

        Raises like ``generate``, also in mid-stream.
        """
        path, body = await self._body(prompt, params, scheduling)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        decoder = answers.EventDecoder()
        last: TokenDelta | None = None
        async with self._request("POST", path, body) as response:
            # Read to the end: the usage, with the cached tokens, comes after the last delta, and
            # the connection can be used again only then.
            async for chunk in response.content.iter_any():
                for data in decoder.feed(chunk):
                    frame = answers.decode_frame(data)
                    if last is not None:
                        last.cached_tokens = max(last.cached_tokens, frame.to_usage().cached_tokens)
                        continue
                    delta = frame.to_delta(params)
                    if delta.finish_reason is not None:
                        last = delta
                    elif delta.text or delta.token_ids or delta.prompt_logprobs:
                        yield delta
        if last is None:
            raise ConnectionError(f"{self._base}: the answer broke off")
        yield last

    # -- requests --------------------------------------------------------------------------------

    async def _body(
        self, prompt: Prompt, params: SamplingParams | None, scheduling: SchedulingParams | None
    ) -> tuple[str, dict[str, Any]]:
        """The route for a prompt, and what to post there."""
        check_kind("params", params, SamplingParams)
        check_kind("scheduling", scheduling, SchedulingParams)
        plain = plain_prompt(prompt)
        fields = {} if params is None else sampling_fields(params, chat=is_chat(plain))
        name = self._name or (await self._served_model()).id
        head = {"model": name, "return_token_ids": True}
        fields |= scheduling_fields(scheduling or SchedulingParams())
        if is_chat(plain):
            return "/v1/chat/completions", {**head, "messages": plain, **fields}
        if params is not None and params.max_tokens is None:
            room = await self._room(plain)
            fields["max_tokens"] = None if room is None else default_max_tokens(params, room)
        return "/v1/completions", {**head, "prompt": plain, **fields}

    async def _room(self, prompt: str | list[Any]) -> int | None:
        """The context's room for the answer, in tokens, if the server tells its length.

        Completions take a missing ``max_tokens`` for 16, so AsyncLLM's default is sent instead.
        """
        model = await self._served_model()
        if model.max_model_len is None:
            return None
        if isinstance(prompt, str):
            body = {"model": model.id, "prompt": prompt}
            count = (await self._fetch(answers.TokenCount, "POST", "/tokenize", body)).count
        else:
            count = len(prompt)
        return max(model.max_model_len - count, 1)

    async def _served_model(self) -> answers.Model:
        """The model in use, as the server describes it; fetched once."""
        async with self._asking_model:
            if self._model is None:
                models = (await self._fetch(answers.ModelList, "GET", "/v1/models")).data
                named = [model for model in models if self._name in (None, model.id)]
                if not named:
                    raise NotFound(f"{self._base} does not serve {self._name or 'any model'}")
                self._model = named[0]
            return self._model

    async def _fetch(self, kind: type[T], method: str, path: str, body: Any = None) -> T:
        async with self._request(method, path, body) as response:
            return answers.decode(await response.read(), kind)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with good status; leaving before its end closes the connection."""
        if self._session is None:
            # No limit on connections: the server has a queue of its own and says when it is full.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=self._timeout,
                headers={**self._headers, "Content-Type": "application/json"},
            )
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self._base + path, data=data) as response:
                if response.status >= 400:
                    raise answers.decode_error(
                        response.status, response.headers, await response.read()
                    )
                yield response
        except TimeoutError as error:
            raise TimeoutError(f"{self._base}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{self._base}: {error}") from error
