"""From a conversation to its prompt, and to the readers of its answers, for every chat route."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.chat.messages import encode_messages
from asyncllm.server.chat.structured import calls_grammar, enforceable_tools
from asyncllm.text.parsing import call_structure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.text.chat_reader import ChatReader, TokenPlaces
    from asyncllm.text.parsing import CallStructure, Formats
    from asyncllm.types import SamplingParams


class Conversation(NamedTuple):
    """A prompt with its parameters, and what turns the answers back into messages.

    Attributes:
        tools: the tools that may be called.
        continued: the beginning of the answer, where the prompt already contains it.
        forced: whether the answer consists of calls only; stop strings do not end it then.
        ineffective: fields of the request that had no effect.
    """

    prompt_ids: list[int]
    params: SamplingParams
    reader: ChatReader
    tools: Sequence[dict[str, Any]]
    continued: str
    forced: bool = False
    ineffective: Sequence[str] = ()

    def message_reader(self) -> MessageReader:
        """A reader for one more answer."""
        reader = self.reader
        parser = reader.parser(self.prompt_ids, self.tools, self.continued)
        places = self.places() if reader.formats.reasoning and not reader.reasoning_ends else None
        return MessageReader(parser, reader.reasoning_ends, places, only_calls=self.forced)

    def places(self) -> TokenPlaces:
        """The places of tokens in the text of one more answer."""
        params = self.params
        return self.reader.places(
            self.prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_special_tokens,
        )


async def open_conversation(
    llm: Model, body: ChatRequest, params: SamplingParams, reservation: Reservation
) -> Conversation:
    """Render and encode a conversation; ``reservation`` is for the requests of its prompt.

    Raises:
        QueueFull, BadRequest: as ``encode_messages``.
    """
    prompt_ids = await encode_messages(
        llm,
        body.messages,
        body,
        reservation=reservation,
        reasoning_effort=body.reasoning_effort,
        any_length=body.truncate_prompt_tokens is not None,
    )
    reader = llm.chat_reader
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    changes: dict[str, Any] = {}
    if reader.shown and (tools or reader.formats.reasoning is not None):
        changes["shown_special_tokens"] = reader.shown
    ineffective: list[str] = []
    for_grammar: Sequence[dict[str, Any]] = tools
    if tools and body.tool_choice not in (None, "auto") and reader.formats.tools is not None:
        for_grammar = await asyncio.to_thread(enforceable_tools, tools, ineffective)
    structure = await read_large(_structure, reader.formats, for_grammar, body)
    forced = structure is not None and not structure.free_text
    if structure is not None and (forced or params.grammar is None):
        changes["grammar"] = calls_grammar(structure)
    elif tools:
        ineffective = _not_enforced(tools, body)
    if forced:
        # A stop string would cut off the JSON of a call that must be made.
        changes["stop"] = ()
    continued = _text_of(body.messages[-1]) if body.continue_final_message else ""
    budget = body.thinking_token_budget
    grammar = changes.get("grammar", params.grammar)
    if budget is not None or grammar is not None or params.stop:
        changes["reasoning"] = reader.reasoning(prompt_ids, budget, continued)
    if changes:
        params = msgspec.structs.replace(params, **changes)
    return Conversation(prompt_ids, params, reader, tools, continued, forced, ineffective)


def _structure(
    formats: Formats, tools: Sequence[dict[str, Any]], body: ChatRequest
) -> CallStructure | None:
    """The format of the calls that the model may or must make."""
    parallel = body.parallel_tool_calls is not False
    return call_structure(formats, tools, body.tool_choice or "auto", parallel=parallel)


def _not_enforced(tools: Sequence[dict[str, Any]], body: ChatRequest) -> list[str]:
    """What the request wants of calls that the model may make, where no grammar holds it to that.

    Calls that begin like other text cannot be told from it in time, and an answer has one grammar.
    """
    strict = any(tool.get("function", {}).get("strict") for tool in tools)
    return ["tools.strict"] * strict + ["parallel_tool_calls"] * (body.parallel_tool_calls is False)


def _text_of(message: dict[str, Any]) -> str:
    """The text of a checked message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
