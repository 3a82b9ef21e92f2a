"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.server.logprobs import chat_logprobs
from asyncllm.server.messages import encode_messages
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.reply import OpenAIReply
from asyncllm.server.sampling import check_count, check_options, fan_out, sampling_params
from asyncllm.server.scheduling import scheduling_params
from asyncllm.server.service import SERVICE
from asyncllm.server.unsupported import unsupported

if TYPE_CHECKING:
    from aiohttp import web

    from asyncllm.text.tokenizer import Tokenizer
    from asyncllm.types import TokenDelta, TokenLogprob


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, ChatRequest)
    model = service.resolve_model(asked.model)
    _check(asked)
    check_count(1, asked.n or 1, llm.limits.max_waiting)
    params = sampling_params(
        asked,
        llm.default_params,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
    )
    scheduling = scheduling_params(asked, service.keys.tenant_of(request))
    effort = asked.reasoning_effort
    try:
        prompt = await encode_messages(
            llm,
            asked.messages,
            asked,
            tenant=scheduling.tenant,
            **({} if effort is None else {"reasoning_effort": effort}),
        )
        jobs = fan_out([prompt], asked.n or 1, params, scheduling)
        reply = ChatReply(asked, model, prompt, llm.tokenizer)
        return await service.answer(request, jobs, reply, asked)
    except BadRequest as error:
        # The engine knows prompts and max_tokens only.
        if error.param == "prompt":
            error.param = "messages"
        elif error.param == "max_tokens" and asked.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise


def _check(asked: ChatRequest) -> None:
    check_options(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if asked.tool_choice not in (None, "none") and asked.tools is None:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if asked.echo:
        raise unsupported("echo")
    if asked.add_special_tokens:
        raise unsupported("add_special_tokens")  # the template has written them already


class ChatReply(OpenAIReply):
    """``chat.completion`` and its chunks."""

    def __init__(self, asked: ChatRequest, model: str, prompt: list[int], tokenizer: Tokenizer):
        super().__init__(
            asked,
            model=model,
            prompts=[prompt],
            id_prefix="chatcmpl",
            kind="chat.completion",
            frame_kind="chat.completion.chunk",
            text_field=b'"delta":{"content":',
            text_tail=b'},"logprobs":null,"finish_reason":null',
        )
        self._with_logprobs = bool(asked.logprobs)
        self.plain = self.plain and not self._with_logprobs
        self._tokenizer = tokenizer

    def opening(self) -> bytes:
        more = {"prompt_token_ids": self.prompts[0]} if self.with_ids else {}
        delta = {"role": "assistant", "content": ""}
        return b"".join([self.frame(_choice(i, delta), **more) for i in range(self.n)])

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self.count(index, delta)
        if self.plain:
            frames = self.text_frame(index, delta.text) if delta.text else b""
        else:
            frames = self._rich_frame(index, delta)
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            frames += self.frame(_choice(index, {}, **end))
        return frames

    def _rich_frame(self, index: int, delta: TokenDelta) -> bytes:
        choice = _choice(index, {"content": delta.text}, logprobs=self._logprobs(delta.logprobs))
        if self.with_ids:
            choice["token_ids"] = delta.token_ids
        return self.frame(choice)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        choices = []
        for index, output in enumerate(outputs):
            self.count(index, output)
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": output.text},
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if self.with_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        more = {"prompt_token_ids": self.prompts[0]} if self.with_ids else {}
        return self.whole(choices, **more)

    def _logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(entries or (), self._tokenizer)


def _choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
