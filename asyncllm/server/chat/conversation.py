"""From the messages of a chat to its prompt, and to the readers of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import BadRequest
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.chat.messages import ChatFields
from asyncllm.server.chat.prompts import cut_to_fit, truncate
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.model import Model
from asyncllm.text.chat_reader import ChatReader, TokenPlaces
from asyncllm.text.grammar import GrammarSpec, StructuralTags, Tag
from asyncllm.text.parsing import CallStructure, call_structure
from asyncllm.types import SamplingParams

#: Template arguments that belong to the server, not to ``chat_template_kwargs``.
_RESERVED: Final = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "any_length",
    )
)

#: Values of ``reasoning_effort``; a template knows some of them.
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: Values with which clients say that the effort is the template's own.
_OWN_EFFORT: Final = (None, "", "default", "auto")
#: Begins the line with which Claude Code says whom to bill.
_BILLING: Final = "x-anthropic-billing-header:"

#: How long the schemas of one request may take to be checked; those of 24 tools take 10 ms.
_CHECK_SECONDS: Final = 1.0


class TemplateFields(ChatFields, Protocol):
    """The fields of a request that decide how messages become a prompt; they have been read."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


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
    llm: Model,
    body: ChatRequest,
    params: SamplingParams,
    reservation: Reservation,
    *,
    cut: bool = False,
) -> Conversation:
    """Render, encode and truncate a chat that has been read.

    Args:
        reservation: for the requests of its prompt.
        cut: whether ``max_tokens`` is cut to what the context has room for.

    Raises:
        QueueFull, BadRequest: as ``encode_messages``; or calls cannot be enforced that must be.
    """
    prompt_ids = await encode_messages(
        llm,
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
        for_grammar = await asyncio.to_thread(_enforceable, tools, ineffective)
    structure = await read_large(
        call_structure,
        reader.formats,
        for_grammar,
        body.tool_choice or "auto",
        parallel=body.parallel_tool_calls is not False,
    )
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
    context = llm.limits.max_model_len
    prompt_ids = truncate(prompt_ids, body, context, params.max_tokens)
    if cut:
        params = cut_to_fit(params, prompt_ids, context)
    return Conversation(prompt_ids, params, reader, tools, continued, forced, ineffective)


async def encode_messages(
    llm: Model,
    body: TemplateFields,
    *,
    reservation: Reservation | None = None,
    reasoning_effort: str | dict[str, Any] | None = None,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        reservation, any_length: see ``AsyncLLM.encode_chat``.
        reasoning_effort: one of ``_EFFORTS``, for the template, or an object that has it as
            ``effort``; None and "default" leave it out.

    Raises:
        QueueFull: a prompt of this length cannot join the queue now.
        BadRequest: there are no messages, the effort is malformed, or there is no chat template, or
            it fails.
    """
    if llm.chat_template is None:
        raise BadRequest("the model has no chat template", param="messages")
    messages = _without_billing(body.messages)
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    options = body.chat_template_kwargs or {}
    if taken := _RESERVED.intersection(options):
        raise BadRequest(
            f"chat_template_kwargs must not contain {min(taken)}", param="chat_template_kwargs"
        )
    resume = bool(body.continue_final_message)
    generate = body.add_generation_prompt
    if isinstance(reasoning_effort, dict):
        reasoning_effort = reasoning_effort.get("effort")
    if reasoning_effort not in _OWN_EFFORT:
        if reasoning_effort not in _EFFORTS:
            message = f"reasoning_effort must be one of {', '.join(_EFFORTS)}"
            raise BadRequest(message, param="reasoning_effort")
        options = {"reasoning_effort": reasoning_effort, **options}
    return await llm.encode_chat(
        messages,
        reservation,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=not resume if generate is None else generate,
        continue_final_message=resume,
        any_length=any_length,
        **options,
    )


def _without_billing(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the line that Claude Code puts before its system prompt.

    It is different in each request, and would keep the prompt from being found in the cache.
    """
    kept = []
    for message in messages:
        content = message.get("content")
        if message["role"] in ("system", "developer") and isinstance(content, str):
            head, _, rest = content.lstrip().partition("\n")
            if head.lower().startswith(_BILLING):
                if not rest:
                    continue
                message = {**message, "content": rest}
        kept.append(message)
    return kept


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message that has been read."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _not_enforced(tools: Sequence[dict[str, Any]], body: ChatRequest) -> list[str]:
    """What the request wants of calls that the model may make, where no grammar holds it to that.

    Calls that begin like other text cannot be told from it in time, and an answer has one grammar.
    """
    strict = any(tool.get("function", {}).get("strict") for tool in tools)
    return ["tools.strict"] * strict + ["parallel_tool_calls"] * (body.parallel_tool_calls is False)


def _enforceable(tools: Sequence[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools for a grammar that forces calls.

    Where no grammar can hold a model to a tool's schema, its arguments may be any object, unless
    the tool is ``strict``: then the request will be refused.

    Args:
        left_out: gets names for the schemas that are not enforced.
    """
    from asyncllm.text.grammar.limits import Budget
    from asyncllm.text.grammar.schema.writer import schema_rules

    budget, kept = Budget(_CHECK_SECONDS), []
    for tool in tools:
        function = tool["function"]
        if function.get("parameters") and not function.get("strict"):
            try:
                schema_rules(function["parameters"], budget=budget)
            except BadRequest:
                left_out.append(f"tools.{function['name']}.parameters")
                tool = {**tool, "function": {**function, "parameters": {"type": "object"}}}
        kept.append(tool)
    return kept


def calls_grammar(structure: CallStructure) -> GrammarSpec | None:
    """The grammar of a text with tool calls; None when nothing needs to be enforced."""
    tags = structure.separate_tags()
    if structure.free_text and not structure.at_most_one and not any(tag.strict for tag in tags):
        return None
    return StructuralTags(
        tags=tuple(
            Tag(tag.begin, tag.schema if tag.strict or not structure.free_text else {}, tag.end)
            for tag in tags
        ),
        triggers=structure.triggers,
        at_least_one=not structure.free_text,
        stop_after_first=structure.at_most_one,
        free_text=structure.free_text,
    )
