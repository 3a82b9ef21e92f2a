"""POST /v1/chat/completions, and /render below it: what a chat would send to the model."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import UNSET

from asyncllm.engine.requests.check import check_request
from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.messages import read_chat
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.http.parse import unsupported
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai import schemas
from asyncllm.server.openai.beams import answer_beams
from asyncllm.server.openai.logprobs import prompt_logprobs, token_logprobs
from asyncllm.server.openai.reply import OpenAIReply, check_scoring
from asyncllm.server.openai.requests import (
    check_options,
    ineffective_fields,
    logprobs_needed,
    num_generated,
)
from asyncllm.server.openai.schemas import Rendered
from asyncllm.server.service import SERVICE, Service
from asyncllm.text.parsing import (
    Content,
    End,
    Event,
    Message,
    Reasoning,
    ToolArguments,
    ToolStart,
    message_of,
)
from asyncllm.types import SchedulingParams, TokenDelta, TokenLogprob


class ChatReply(OpenAIReply):
    """``chat.completion`` and its chunks."""

    id_prefix = "chatcmpl"
    answer_type = schemas.ChatCompletion
    chunk_type = schemas.ChatCompletionChunk

    def __init__(
        self, body: ChatRequest, model: str, conversation: Conversation, tokenizer: Tokenizer
    ):
        super().__init__(body, model, [conversation.prompt_ids], body.prompt_logprobs)
        self._with_logprobs = bool(body.logprobs)
        self._predicts = body.prediction is not None
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self.plain = self.plain and not self._with_logprobs and self._prompt_logprobs is None
        self._tokenizer = tokenizer
        [self._prompt_fields] = self.prompt_fields(body, tokenizer)
        self._readers = [conversation.message_reader() for _ in range(self.n)]

    def text_choice(self, index: int) -> schemas.ChatChunkChoice:
        return _choice(index, schemas.MessageDelta(content=""))

    def opening(self) -> bytes:
        delta = schemas.MessageDelta(role="assistant", content="")
        fields = self._prompt_fields
        return b"".join([self.frame(_choice(i, delta), **fields) for i in range(self.n)])

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self.count(index, delta)
        reader = self._readers[index]
        events = reader.read(delta)
        if self.plain:
            frames = b"".join([self._event_frame(index, event) for event in events])
        else:
            frames = self._rich_frames(index, delta, events)
        if delta.finish_reason is not None:
            last = _choice(index, schemas.MessageDelta())
            last.finish_reason = reader.finish_reason(delta)
            last.stop_reason = delta.stop_reason
            frames += self.frame(last)
        return frames

    def _event_frame(self, index: int, event: Event) -> bytes:
        if isinstance(event, Content):
            return self.text_frame(index, event.text)
        return self.frame(_choice(index, _delta(event)))

    def _rich_frames(self, index: int, delta: TokenDelta, events: list[Event]) -> bytes:
        """The first frame carries the tokens' data; there is one even without an event."""
        choices = [_choice(index, _delta(event)) for event in events or [Content("")]]
        first, *others = choices
        first.logprobs = self._logprobs(delta.logprobs)
        if self.with_ids:
            first.token_ids = delta.token_ids
        frames = [self.frame(first, **self._scores(delta)), *map(self.frame, others)]
        return b"".join(frames)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        outputs = self.best_outputs(outputs)
        choices = (self._whole_choice(index, output) for index, output in enumerate(outputs))
        return self.whole(choices, **self._prompt_fields, **self._scores(outputs[0]))

    def _whole_choice(self, index: int, output: TokenDelta) -> schemas.ChatChoice:
        self.count(index, output)
        reader = self._readers[index]
        message = message_of(reader.read(output))
        return schemas.ChatChoice(
            index=index,
            message=_message(message),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=reader.finish_reason(output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.with_ids else UNSET,
        )

    def _usage(self) -> schemas.Usage:
        usage = super()._usage()
        reasoning = sum(reader.reasoning_tokens for reader in self._readers)
        usage.completion_tokens_details = schemas.CompletionTokensDetails(
            reasoning_tokens=reasoning
        )
        if self._predicts:
            usage.completion_tokens_details.accepted_prediction_tokens = self.num_right
            usage.completion_tokens_details.rejected_prediction_tokens = self.num_wrong
        return usage

    def _logprobs(self, entries: list[TokenLogprob] | None) -> schemas.ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        content = token_logprobs(entries or (), self._tokenizer, as_ids=self._as_ids)
        return schemas.ChatLogprobs(content=content, refusal=None)

    def _scores(self, delta: TokenDelta) -> dict[str, Any]:
        """The prompt's logprobs, where they are wanted and the delta has them."""
        if self._prompt_logprobs is None or delta.prompt_logprobs is None:
            return {}
        most = self._prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(delta.prompt_logprobs, self._tokenizer, most)}


def _delta(event: Event) -> schemas.MessageDelta:
    """Reasoning has two names, because clients read one or the other."""
    match event:
        case Content(text):
            return schemas.MessageDelta(content=text)
        case Reasoning(text):
            return schemas.MessageDelta(reasoning=text, reasoning_content=text)
        case ToolStart(index, id, name):
            function = schemas.FunctionCallDelta(name=name, arguments="")
            call = schemas.ToolCallDelta(index=index, id=id, type="function", function=function)
            return schemas.MessageDelta(tool_calls=[call])
        case ToolArguments(index, text):
            function = schemas.FunctionCallDelta(arguments=text)
            call = schemas.ToolCallDelta(index=index, function=function)
            return schemas.MessageDelta(tool_calls=[call])
        case End():
            return schemas.MessageDelta()


def _message(message: Message) -> schemas.AnswerMessage:
    """The whole message; its content is null if there are calls and no text, as with OpenAI."""
    calls = [
        schemas.ToolCall(
            id=call.id,
            type="function",
            function=schemas.FunctionCall(name=call.name, arguments=call.arguments),
        )
        for call in message.calls
    ]
    return schemas.AnswerMessage(
        role="assistant",
        content=message.content if message.content or not calls else None,
        refusal=None,
        reasoning=message.reasoning or UNSET,
        reasoning_content=message.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _choice(index: int, delta: schemas.MessageDelta) -> schemas.ChatChunkChoice:
    return schemas.ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, ChatRequest)
    model = service.resolve_model(body.model)
    with _named(body):
        conversation, scheduling = await _open(service, request, body)
        prompts, params = [conversation.prompt_ids], conversation.params
        reply = await read_large(ChatReply, body, model, conversation, service.llm.tokenizer)
        reply.sign(service.fingerprint)
        if body.use_beam_search:
            return await answer_beams(service, request, prompts, params, scheduling, reply, body)
        n = reply.best_of
        return await service.answer(request, prompts, params, scheduling, reply, body, n)


async def render_chat(request: web.Request) -> web.Response:
    """Checks everything that a chat checks before it is queued."""
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, ChatRequest)
    service.resolve_model(body.model)
    with _named(body):
        conversation, scheduling = await _open(service, request, body)
        prompt = conversation.prompt_ids
        check_scoring(body, [prompt], body.prompt_logprobs)
        [job] = await service.jobs([prompt], conversation.params, scheduling, body)
        check_request(prompt, job.params, llm.limits)
    decode = partial(llm.tokenizer.decode, prompt, skip_special_tokens=False)
    text = await asyncio.to_thread(decode)
    return json_response(Rendered(prompt=text, token_ids=prompt, count=len(prompt)))


def _named(body: ChatRequest) -> AbstractContextManager[None]:
    """Have errors name the request's fields; the engine knows prompts and max_tokens only."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return renamed(names)


async def _open(
    service: Service, request: web.Request, body: ChatRequest
) -> tuple[Conversation, SchedulingParams]:
    """Read a request as far as possible without the engine, and make its prompt.

    What is left out is named in the answer's header.

    Raises:
        QueueFull, BadRequest: as in ``open_conversation``; ``param`` may be the engine's name.
    """
    llm = service.llm
    service.note_ineffective(ineffective_fields(body))
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if body.echo:
        raise unsupported("echo")
    if body.add_special_tokens:
        raise unsupported("add_special_tokens")  # the template has written them already
    check_options(body, 1, llm.limits.max_waiting)
    count = num_generated(body)
    request[RESERVATION].expect(count, count)
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    logprobs = logprobs_needed(body, wanted)
    scheduling = service.scheduling(request, body)
    params = sampling_params(
        body,
        llm.default_params,
        max_tokens=body.max_completion_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    service.note_ineffective(await read_large(read_chat, body))
    conversation = await open_conversation(llm, body, params, request[RESERVATION])
    service.note_ineffective(conversation.ineffective)
    if body.thinking_token_budget is not None and llm.chat_reader.formats.channels is not None:
        service.note_ineffective(["thinking_token_budget"])
    return conversation, scheduling
