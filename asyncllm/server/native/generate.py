"""POST /generate: text or token ids in, text out, nothing else to know."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.prompts import expect_prompts
from asyncllm.server.http.answer import encode
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.native.requests import GenerateRequest
from asyncllm.server.native.schemas import Generated
from asyncllm.server.openai.reply import usage
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.frames import DONE, EVENT_STREAM, error_frame, event
from asyncllm.server.trace import Trace
from asyncllm.types import TokenDelta
from asyncllm.types.sampling_defaults import bounded


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, GenerateRequest)
    service.resolve_model(body.model)
    scheduling = service.scheduling(request, body)
    params = sampling_params(body, llm.default_params, max_tokens=body.max_tokens, logprobs=None)
    if not body.prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    expect_prompts(llm, request[RESERVATION], [body.prompt], 1)
    prompt = await llm.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    params = bounded(params, prompt, len(prompt), llm.limits.max_model_len)
    reply = GenerateReply(len(prompt), with_ids=bool(body.return_token_ids))
    return await service.answer(request, [prompt], params, scheduling, reply, body)


class GenerateReply:
    """``{"text", "finish_reason", "usage"}``; in a stream, the last two come with the last text."""

    id = ""
    content_type = EVENT_STREAM
    explain: Callable[[], Trace] | None = None

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
        return event(self._answer(delta))

    def closing(self) -> bytes:
        if self.explain is None:
            return DONE
        return event(Generated(text="", trace=self.explain())) + DONE

    def failure(self, error: Exception) -> bytes:
        return error_frame(error) + DONE

    lost = failure

    def body(self, outputs: list[TokenDelta]) -> bytes:
        answer = self._answer(outputs[0])
        if self.explain is not None:
            answer.trace = self.explain()
        return encode(answer)

    def _answer(self, delta: TokenDelta) -> Generated:
        self._completion_tokens += len(delta.token_ids)
        answer = Generated(text=delta.text)
        if self._with_ids:
            answer.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
            answer.stop_reason = delta.stop_reason
            answer.usage = usage(self._prompt_tokens, self._completion_tokens, delta.cached_tokens)
        return answer
