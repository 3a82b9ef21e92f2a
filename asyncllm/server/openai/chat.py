"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.messages import allow_tools
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.http.fields import unsupported
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.openai.beams import answer_beams
from asyncllm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from asyncllm.server.openai.options import (
    check_count,
    check_options,
    logprobs_needed,
    num_generated,
)
from asyncllm.server.openai.prompts import check_scoring, check_truncation, prompt_fields, truncate
from asyncllm.server.openai.reply import OpenAIReply
from asyncllm.server.service import SERVICE
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

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aiohttp import web

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.model import Model, Tokenizer
    from asyncllm.types import TokenDelta, TokenLogprob


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, ChatRequest)
    model = service.resolve_model(asked.model)
    scheduling = service.scheduling(request, asked)
    with named_for_chat(asked):
        conversation = await open_chat_request(llm, asked, request[RESERVATION])
        prompt, params = conversation.prompt_ids, conversation.params
        if asked.thinking_token_budget is not None and llm.chat_reader.formats.channels is not None:
            service.note_ineffective(["thinking_token_budget"])
        reply = ChatReply(asked, model, conversation, llm.tokenizer)
        if asked.use_beam_search:
            return await answer_beams(service, request, [prompt], params, scheduling, reply, asked)
        jobs = await fan_out(llm, [prompt], num_generated(asked), params, scheduling, asked)
        return await service.answer(request, jobs, reply, asked)


async def open_chat_request(
    llm: Model, asked: ChatRequest, reservation: Reservation
) -> Conversation:
    """Check a request as far as it goes without the engine, and make its prompt.

    Raises:
        QueueFull, BadRequest: as in ``open_conversation``; the latter by the engine's names.
    """
    _check(asked)
    allow_tools(asked)
    check_count(1, asked, llm.limits.max_waiting)
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    params = sampling_params(
        asked,
        llm.default_params,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        logprobs=logprobs_needed(asked, logprobs),
        prompt_logprobs=asked.prompt_logprobs,
    )
    count = num_generated(asked)
    reservation.expect(count, count)
    conversation = await open_conversation(llm, asked, params, reservation)
    context = llm.limits.max_model_len
    prompt = truncate(conversation.prompt_ids, asked, context, params.max_tokens)
    check_scoring(asked, [prompt], params.prompt_logprobs)
    return conversation._replace(prompt_ids=prompt)


def named_for_chat(asked: ChatRequest) -> AbstractContextManager[None]:
    """Have errors name the fields of the request: the engine knows prompts and max_tokens only."""
    names = {"prompt": "messages"}
    if asked.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return renamed(names)


def _check(asked: ChatRequest) -> None:
    check_options(asked)
    check_truncation(asked)
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

    def __init__(
        self,
        asked: ChatRequest,
        model: str,
        conversation: Conversation,
        tokenizer: Tokenizer,
    ):
        super().__init__(
            asked,
            model=model,
            prompts=[conversation.prompt_ids],
            id_prefix="chatcmpl",
            kind="chat.completion",
            frame_kind="chat.completion.chunk",
            text_field=b'"delta":{"content":',
            text_tail=b'},"logprobs":null,"finish_reason":null',
        )
        self._with_logprobs = bool(asked.logprobs)
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._prompt_logprobs = asked.prompt_logprobs
        self.plain = self.plain and not self._with_logprobs and self._prompt_logprobs is None
        self._tokenizer = tokenizer
        self._prompt_fields = prompt_fields(asked, conversation.prompt_ids, tokenizer)
        self._turns = [conversation.turn() for _ in range(self.n)]

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        fields = self._prompt_fields
        return b"".join([self.frame(_choice(i, delta), **fields) for i in range(self.n)])

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self.count(index, delta)
        turn = self._turns[index]
        events = turn.read(delta)
        if self.plain:
            frames = b"".join([self._event_frame(index, event) for event in events])
        else:
            frames = self._rich_frames(index, delta, events)
        if delta.finish_reason is not None:
            reason = turn.finish_reason(delta)
            end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            frames += self.frame(_choice(index, {}, **end))
        return frames

    def _event_frame(self, index: int, event: Event) -> bytes:
        if isinstance(event, Content):
            return self.text_frame(index, event.text)
        return self.frame(_choice(index, _delta(event)))

    def _rich_frames(self, index: int, delta: TokenDelta, events: list[Event]) -> bytes:
        """The first frame has what belongs to the tokens; there is one even without an event."""
        choices = [_choice(index, _delta(event)) for event in events or [Content("")]]
        choices[0]["logprobs"] = self._logprobs(delta.logprobs)
        if self.with_ids:
            choices[0]["token_ids"] = delta.token_ids
        first, *others = choices
        frames = [self.frame(first, **self._scores(delta)), *map(self.frame, others)]
        return b"".join(frames)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        choices = []
        outputs = self.best(outputs)
        for index, output in enumerate(outputs):
            self.count(index, output)
            turn = self._turns[index]
            message = message_of(turn.read(output))
            choice = {
                "index": index,
                "message": _message(message),
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": turn.finish_reason(output),
                "stop_reason": output.stop_reason,
            }
            if self.with_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        return self.whole(choices, **self._prompt_fields, **self._scores(outputs[0]))

    def _usage(self) -> dict[str, Any]:
        reasoning = sum(turn.reasoning_tokens for turn in self._turns)
        details = {"reasoning_tokens": reasoning}
        return {**super()._usage(), "completion_tokens_details": details}

    def _logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(entries or (), self._tokenizer, as_ids=self._as_ids)

    def _scores(self, delta: TokenDelta) -> dict[str, Any]:
        """The prompt's logprobs, where they are wanted and the delta has them."""
        if self._prompt_logprobs is None or delta.prompt_logprobs is None:
            return {}
        most = self._prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(delta.prompt_logprobs, self._tokenizer, most)}


def _delta(event: Event) -> dict[str, Any]:
    """What an event adds to a message.

    Reasoning goes by two names, because clients read one or the other.
    """
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case ToolStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]
            }
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case End():
            return {}


def _message(message: Message) -> dict[str, Any]:
    """A whole message; as with OpenAI, there is no content beside calls unless there is text."""
    calls = message.calls
    content = message.content if message.content or not calls else None
    whole: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        whole |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if calls:
        whole["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return whole


def _choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
