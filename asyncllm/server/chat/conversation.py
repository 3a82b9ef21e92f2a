"""From a conversation to a prompt, and to how its answers are read: for every chat route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncllm.server.chat.message_reader import Turn
from asyncllm.server.chat.messages import encode_messages
from asyncllm.server.chat.structured import calls_grammar
from asyncllm.text.parsing import call_structure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.text.chat_reader import ChatReader
    from asyncllm.text.parsing import CallStructure, Formats
    from asyncllm.text.token_places import TokenPlaces
    from asyncllm.types import SamplingParams


class Conversation(NamedTuple):
    """What the engine is asked, and what turns its answers back into messages.

    Attributes:
        tools: those that may be called.
        continued: the beginning of the answer that the prompt already has.
        forced: whether the answer is calls and nothing else; stop strings do not end it then.
    """

    prompt_ids: list[int]
    params: SamplingParams
    reader: ChatReader
    tools: Sequence[dict[str, Any]]
    continued: str
    forced: bool = False

    def turn(self) -> Turn:
        """For one more answer."""
        reader = self.reader
        parser = reader.parser(self.prompt_ids, self.tools, self.continued)
        places = self.places() if reader.formats.reasoning and not reader.reasoning_ends else None
        return Turn(parser, reader.reasoning_ends, places, only_calls=self.forced)

    def places(self) -> TokenPlaces:
        """Where in the text of one more answer its tokens are."""
        params = self.params
        return self.reader.places(
            self.prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_special_tokens,
        )


async def open_conversation(
    llm: Model, asked: ChatRequest, params: SamplingParams, reservation: Reservation
) -> Conversation:
    """Render and encode a conversation; ``reservation`` is for the requests of its prompt.

    Raises:
        QueueFull, BadRequest: as ``encode_messages``.
    """
    prompt_ids = await encode_messages(
        llm,
        asked.messages,
        asked,
        reservation=reservation,
        reasoning_effort=asked.reasoning_effort,
        any_length=asked.truncate_prompt_tokens is not None,
    )
    reader = llm.chat_reader
    tools = asked.tools if asked.tools and asked.tool_choice != "none" else ()
    changes: dict[str, Any] = {}
    if reader.shown and (tools or reader.formats.reasoning is not None):
        changes["shown_special_tokens"] = reader.shown
    structure = _structure(reader.formats, tools, asked)
    forced = structure is not None and not structure.free_text
    if structure is not None and (forced or params.grammar is None):
        changes["grammar"] = calls_grammar(structure)
    if forced:
        # They would end the calls that must be made, and leave half of their JSON.
        changes["stop"] = ()
    continued = _text_of(asked.messages[-1]) if asked.continue_final_message else ""
    budget = asked.thinking_token_budget
    grammar = changes.get("grammar", params.grammar)
    if budget is not None or grammar is not None or params.stop:
        changes["reasoning"] = reader.reasoning(prompt_ids, budget, continued)
    if changes:
        params = msgspec.structs.replace(params, **changes)
    return Conversation(prompt_ids, params, reader, tools, continued, forced)


def _structure(
    formats: Formats, tools: Sequence[dict[str, Any]], asked: ChatRequest
) -> CallStructure | None:
    """How the calls are written that the model must make, or may."""
    parallel = asked.parallel_tool_calls is not False
    return call_structure(formats, tools, asked.tool_choice or "auto", parallel=parallel)


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message that has been checked."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
