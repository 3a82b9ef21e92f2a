"""From a conversation to a prompt, and to how its answers are read: for every chat route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncllm.server.messages import encode_messages
from asyncllm.server.structured import calls_grammar
from asyncllm.server.turn import Turn
from asyncllm.text.parsing import call_structure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.api import AsyncLLM
    from asyncllm.server.protocol import ChatRequest
    from asyncllm.text.chat_reader import ChatReader
    from asyncllm.text.grammar import GrammarSpec
    from asyncllm.text.parsing import Formats
    from asyncllm.types import SamplingParams


class Conversation(NamedTuple):
    """What the engine is asked, and what turns its answers back into messages.

    Attributes:
        tools: those that may be called.
        continued: the beginning of the answer that the prompt already has.
    """

    prompt_ids: list[int]
    params: SamplingParams
    reader: ChatReader
    tools: Sequence[dict[str, Any]]
    continued: str

    def turn(self) -> Turn:
        """For one more answer."""
        parser = self.reader.parser(self.prompt_ids, self.tools, self.continued)
        return Turn(parser, self.reader.reasoning_ends)


async def open_conversation(
    llm: AsyncLLM, asked: ChatRequest, params: SamplingParams, tenant: str
) -> Conversation:
    """Render and encode a conversation.

    Raises:
        QueueFull, BadRequest: as ``encode_messages``.
    """
    prompt_ids = await encode_messages(
        llm,
        asked.messages,
        asked,
        tenant=tenant,
        reasoning_effort=asked.reasoning_effort,
        any_length=asked.truncate_prompt_tokens is not None,
    )
    reader = llm.chat_reader
    tools = asked.tools if asked.tools and asked.tool_choice != "none" else ()
    changes: dict[str, Any] = {}
    if tools or reader.formats.reasoning is not None:
        changes["shown_special_tokens"] = reader.shown
    if (calls := _calls_grammar(reader.formats, tools, asked, params.grammar)) is not None:
        changes["grammar"] = calls
    budget = asked.thinking_token_budget
    grammar = changes.get("grammar", params.grammar)
    if budget is not None or grammar is not None or params.stop:
        changes["reasoning"] = reader.reasoning(prompt_ids, budget)
    if changes:
        params = msgspec.structs.replace(params, **changes)
    continued = _text_of(asked.messages[-1]) if asked.continue_final_message else ""
    return Conversation(prompt_ids, params, reader, tools, continued)


def _calls_grammar(
    formats: Formats,
    tools: Sequence[dict[str, Any]],
    asked: ChatRequest,
    otherwise: GrammarSpec | None,
) -> GrammarSpec | None:
    """The grammar of the calls that the model must make, or may if the text is free otherwise."""
    parallel = asked.parallel_tool_calls is not False
    structure = call_structure(formats, tools, asked.tool_choice or "auto", parallel=parallel)
    if structure is None or (structure.free_text and otherwise is not None):
        return None
    return calls_grammar(structure)


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message that has been checked."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
