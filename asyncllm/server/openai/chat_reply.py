"""The answers of chat completions: whole ones, and the chunks of streams."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai import schemas
from asyncllm.server.openai.logprobs import prompt_logprobs, token_logprobs
from asyncllm.server.openai.reply import OpenAIReply
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
from asyncllm.types import TokenDelta, TokenLogprob


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
