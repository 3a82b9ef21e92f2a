"""POST /generate: text or token ids in, text out, nothing else to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.max_tokens import bounded
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.chat.scheduling import expect_prompts
from asyncllm.server.http.answer import encode
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.native.requests import GenerateRequest
from asyncllm.server.openai.reply import usage
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.frames import DONE, EVENT_STREAM, error_frame, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from asyncllm.types import TokenDelta


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, GenerateRequest)
    service.resolve_model(asked.model)
    params = sampling_params(asked, llm.default_params, max_tokens=asked.max_tokens, logprobs=None)
    scheduling = service.scheduling(request, asked)
    if not asked.prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    expect_prompts(llm, request[RESERVATION], [asked.prompt], 1)
    prompt = await llm.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
    params = bounded(params, prompt, len(prompt), llm.limits.max_model_len)
    reply = GenerateReply(len(prompt), with_ids=bool(asked.return_token_ids))
    jobs = await fan_out(llm, [prompt], 1, params, scheduling, asked)
    return await service.answer(request, jobs, reply, asked)


class GenerateReply:
    """``{"text", "finish_reason", "usage"}``; streamed, the last text comes with the latter two."""

    id = ""
    content_type = EVENT_STREAM
    explain: Callable[[], dict[str, Any]] | None = None

    def __init__(self, prompt_tokens: int, *, with_ids: bool):
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._with_ids = with_ids

    def opening(self) -> bytes:
        return b""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        if delta.finish_reason is None and not delta.text and not self._with_ids:
            self._completion_tokens += len(delta.token_ids)
            return b""
        return event(self._fields(delta))

    def closing(self) -> bytes:
        trace = b"" if self.explain is None else event({"text": "", "trace": self.explain()})
        return trace + DONE

    def failure(self, error: Exception) -> bytes:
        return error_frame(error) + DONE

    def body(self, outputs: list[TokenDelta]) -> bytes:
        [output] = outputs
        trace = {} if self.explain is None else {"trace": self.explain()}
        return encode(self._fields(output) | trace)

    def _fields(self, delta: TokenDelta) -> dict[str, Any]:
        self._completion_tokens += len(delta.token_ids)
        fields: dict[str, Any] = {"text": delta.text}
        if self._with_ids:
            fields["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            fields["finish_reason"] = delta.finish_reason
            fields["stop_reason"] = delta.stop_reason
            fields["usage"] = usage(
                self._prompt_tokens, self._completion_tokens, delta.cached_tokens
            )
        return fields
