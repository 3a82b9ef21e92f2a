"""POST /generate: text or token ids in, text out, nothing else to know."""

from __future__ import annotations

from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.chat.message_reader import MessageReader, SingleReply
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.prompts import expect_prompts
from asyncllm.server.http.answer import encode
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.native.requests import GenerateRequest
from asyncllm.server.native.schemas import Generated
from asyncllm.server.openai.reply import usage
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.frames import DONE, EVENT_STREAM, error_frame, event
from asyncllm.types import TokenDelta
from asyncllm.types.sampling_defaults import bounded


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, GenerateRequest)
    service.resolve_model(body.model)
    scheduling = service.scheduling(request, body)
    params = sampling_params(body, llm.default_params)
    if not body.prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    expect_prompts(llm, request[RESERVATION], [body.prompt], 1)
    prompt = await llm.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    params = bounded(params, prompt, len(prompt), llm.limits.max_model_len)
    reply = GenerateReply(len(prompt), with_ids=bool(body.return_token_ids))
    return await service.answer(request, [prompt], params, scheduling, reply, body)


class GenerateReply(SingleReply):
    """``{"text", "finish_reason", "usage"}``; in a stream, the last two come with the last text."""

    id = ""
    content_type = EVENT_STREAM

    def __init__(self, prompt_tokens: int, *, with_ids: bool):
        super().__init__(MessageReader(None), prompt_tokens)
        self._with_ids = with_ids

    def opening(self) -> bytes:
        return b""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        answer = self._answer(delta)
        is_empty = delta.finish_reason is None and not delta.text and not self._with_ids
        return b"" if is_empty else event(answer)

    def closing(self) -> bytes:
        return (
            DONE if self.explain is None else event(Generated(text="", trace=self.trace())) + DONE
        )

    def failure(self, error: Exception) -> bytes:
        return error_frame(error) + DONE

    lost = failure

    def body(self, outputs: list[TokenDelta]) -> bytes:
        answer = self._answer(outputs[0])
        answer.trace = self.trace()
        return encode(answer)

    def _answer(self, delta: TokenDelta) -> Generated:
        self.read(delta)
        answer = Generated(text=delta.text)
        if self._with_ids:
            answer.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
            answer.stop_reason = delta.stop_reason
            answer.usage = usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        return answer
