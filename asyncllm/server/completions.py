"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.server.logprobs import CompletionLogprobs
from asyncllm.server.protocol import CompletionRequest
from asyncllm.server.reply import OpenAIReply
from asyncllm.server.sampling import check_count, check_options, fan_out, sampling_params
from asyncllm.server.scheduling import check_room, scheduling_params
from asyncllm.server.service import SERVICE
from asyncllm.server.unsupported import unsupported
from asyncllm.types import TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from aiohttp import web

    from asyncllm.api import AsyncLLM
    from asyncllm.text.tokenizer import Tokenizer

#: OpenAI's default, which clients of this route rely on.
MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, CompletionRequest)
    model = service.resolve_model(asked.model)
    check_options(asked)
    if asked.echo and asked.logprobs is not None:
        raise unsupported("echo")  # it asks for the prompt's logprobs
    params = sampling_params(
        asked,
        llm.default_params,
        max_tokens=asked.max_tokens or MAX_TOKENS,
        logprobs=asked.logprobs,
    )
    scheduling = scheduling_params(asked, service.keys.tenant_of(request))
    given, n = _split(asked.prompt), asked.n or 1
    check_count(len(given), n, llm.limits.max_waiting)
    check_room(llm, given, n, scheduling.tenant)
    prompts = await _encode(llm, given, asked.add_special_tokens is not False)
    jobs = fan_out(prompts, n, params, scheduling)
    echo = [_text_of(llm, prompt) for prompt in given] if asked.echo else None
    reply = CompletionReply(asked, model, prompts, llm.tokenizer, echo)
    return await service.answer(request, jobs, reply, asked)


def _split(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One text or list of token ids for each prompt, whichever of the four forms was sent."""
    if isinstance(prompt, str):
        prompt = [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        prompt = [prompt]
    elif len(kinds) > 1:
        raise BadRequest("prompt mixes texts and token ids", param="prompt")
    if not prompt or not all(prompt):
        raise BadRequest("the prompt is empty", param="prompt")
    return prompt


async def _encode(
    llm: AsyncLLM, given: list[str] | list[list[int]], special: bool
) -> list[list[int]]:
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoded = await llm.encode_all(texts, add_special_tokens=special) if texts else []
    return encoded + [prompt for prompt in given if not isinstance(prompt, str)]


def _text_of(llm: AsyncLLM, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)


class CompletionReply(OpenAIReply):
    """``text_completion``, which is also what its frames are called."""

    def __init__(
        self,
        asked: CompletionRequest,
        model: str,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        echo: list[str] | None,
    ):
        """``echo`` is the text of each prompt when it is to stand before the answer."""
        super().__init__(
            asked,
            model=model,
            prompts=prompts,
            id_prefix="cmpl",
            kind="text_completion",
            frame_kind="text_completion",
            text_field=b'"text":',
            text_tail=b',"logprobs":null,"finish_reason":null',
        )
        self._echo = echo
        self._logprobs: list[CompletionLogprobs] | None = None
        if asked.logprobs is not None:
            self.plain = False
            self._logprobs = [CompletionLogprobs(tokenizer) for _ in range(len(prompts) * self.n)]

    def opening(self) -> bytes:
        if self._echo is None and not self.with_ids:
            return b""
        return b"".join(
            [self.frame(self._first_choice(i)) for i in range(len(self.prompts) * self.n)]
        )

    def _first_choice(self, index: int) -> dict[str, Any]:
        choice = self._choice(index, TokenDelta())
        if self._echo is not None:
            choice["text"] = self._echo[index // self.n]
        if self.with_ids:
            choice["prompt_token_ids"] = self.prompts[index // self.n]
        return choice

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self.count(index, delta)
        if not self.plain or delta.finish_reason is not None:
            return self.frame(self._choice(index, delta))
        return self.text_frame(index, delta.text) if delta.text else b""

    def body(self, outputs: list[TokenDelta]) -> bytes:
        choices = []
        for index, output in enumerate(outputs):
            self.count(index, output)
            choice = self._choice(index, output)
            if self._echo is not None:
                choice["text"] = self._echo[index // self.n] + output.text
            if self.with_ids:
                choice["prompt_token_ids"] = self.prompts[index // self.n]
            choices.append(choice)
        return self.whole(choices)

    def _choice(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._lists(index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.with_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _lists(self, index: int, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].lists(entries or ())
