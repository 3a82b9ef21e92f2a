"""From a request for a message to a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncllm.errors import BadRequest
from asyncllm.server.anthropic import requests
from asyncllm.server.anthropic.requests import MessagesRequest
from asyncllm.server.chat.adapter import convert_part, generating_fields, tool_call
from asyncllm.server.chat.messages import function_of, plain_choice, result_content
from asyncllm.server.chat.requests import ChatRequest, ChatTool, NamedSchema, ResponseFormat
from asyncllm.server.http.parse import unsupported

#: From the fields of a chat to this API's names.
NAMES: Final = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
#: Seconds by ``cache_control.ttl``.
_TTLS: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_ONE_CALL: Final = "disable_parallel_tool_use"
#: Fields that ask for what only another server could do: they are left out.
_INEFFECTIVE: Final = ("context_management", "container", "mcp_servers")
#: Blocks whose meaning would be lost with them, as the text of a user's turn speaks of them.
_NEEDED: Final = frozenset(("image", "document", "audio", "video"))
#: Fields of blocks that tell a model nothing.
_SILENT: Final = frozenset(
    (
        *("type", "id", "tool_use_id", "cache_control", "caller", "citations", "page_age"),
        *("encrypted_content", "encrypted_index", "encrypted_stdout"),
    )
)
#: Values that tell a model nothing; a zero does.
_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})


def ineffective(body: MessagesRequest) -> list[str]:
    """Fields without effect: reasoning is always shown, for example."""
    names = [name for name in _INEFFECTIVE if getattr(body, name)]
    if body.thinking is not None and body.thinking.display is not None:
        names.insert(0, "thinking.display")
    return names


def cache_ttl(body: MessagesRequest) -> float | None:
    """Seconds for which the longest ``cache_control`` pins the prefix; None without any.

    ``chat_of`` has checked the body.
    """
    parts = list(body.tools or ())
    for message in body.messages:
        if isinstance(message.content, list):
            parts += message.content
    for part in parts:  # which grow
        if part.get("type") == "tool_result" and isinstance(part.get("content"), list):
            parts += [block for block in part["content"] if isinstance(block, dict)]
    marks = [part.get("cache_control") for part in parts]
    ttls = [mark.get("ttl") for mark in marks if isinstance(mark, dict)]
    given = [body, *(() if isinstance(body.system, str) else body.system or ())]
    ttls += [each.cache_control.ttl for each in given if each.cache_control is not None]
    known = [ttl for ttl in ttls if ttl is None or isinstance(ttl, str)]
    return max((_TTLS[ttl] for ttl in known if ttl in _TTLS), default=None)


def chat_of(body: requests.CountTokensRequest, left_out: list[str]) -> ChatRequest:
    """
    Args:
        left_out: gets names for what is left out.

    Raises:
        BadRequest: a message, a tool or the tool choice is malformed or not supported.
    """
    if body.return_token_ids:
        raise unsupported("return_token_ids")
    messages = read_messages(body.system, body.messages, left_out)
    tools = _tools(body.tools or (), left_out)
    shared = generating_fields(body)
    if body.stop_sequences is not None:
        if body.stop is not None:
            raise BadRequest("stop and stop_sequences exclude each other", param="stop")
        shared["stop"] = body.stop_sequences
    config = body.output_config
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        schema = NamedSchema(schema=form.schema)
        shared["response_format"] = ResponseFormat("json_schema", schema)
    one_call = isinstance(choice := body.tool_choice, dict) and choice.get(_ONE_CALL)
    return ChatRequest(
        **shared,
        messages=messages,
        tools=tools or None,
        tool_choice=_tool_choice(body, [tool["function"]["name"] for tool in tools]),
        parallel_tool_calls=not one_call,
        continue_final_message=_continues(messages),
        reasoning_effort=None if config is None else config.effort,
        **_thinking(body),
    )


def _thinking(body: requests.CountTokensRequest) -> dict[str, Any]:
    """``enable_thinking`` is the name that most chat templates have for the switch."""
    options = body.chat_template_kwargs
    thinking = body.thinking
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return {"chat_template_kwargs": options}
    enabled = thinking.type == "enabled"
    if enabled and thinking.budget_tokens is None:
        where = "thinking.budget_tokens"
        raise BadRequest(f"{where} is required", param=where)
    return {
        "chat_template_kwargs": {"enable_thinking": enabled, **(options or {})},
        "thinking_token_budget": thinking.budget_tokens if enabled else None,
    }


def _continues(messages: Sequence[dict[str, Any]]) -> bool | None:
    """Whether the answer continues the last message.

    Raises:
        BadRequest: the last message ends with calls, whose results are missing.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return None
    if "tool_calls" in last or last["content"] is None:
        raise BadRequest("the last message must end with text or a tool_result", param="messages")
    return True


def _tools(given: Sequence[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The client's own tools. Those of Anthropic's, which have a type and no schema, are left out.

    Raises:
        BadRequest: a tool is malformed.
    """
    tools = []
    for i, each in enumerate(given):
        kind, where = each.get("type"), f"tools[{i}]"
        tool = function_of(each)
        if kind in (None, "custom") and "function" not in each:
            convert_part(each, requests.ClientTool, where)
        elif tool is None and kind != "function":
            left_out.append(f"{where}.{kind}")
        else:
            convert_part(tool or each, ChatTool, where)
        tools += [tool] if tool is not None else []
    return tools


def _tool_choice(body: requests.CountTokensRequest, names: Sequence[str]) -> Any:
    """The choice as chat completions take it."""
    choice = plain_choice(body.tool_choice)
    if choice in (None, "auto", "none"):
        return choice
    if not names:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    match choice:
        case "required":
            return choice
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise BadRequest("tool_choice: there is no such tool", param="tool_choice.name")
            return choice
    raise BadRequest("tool_choice must have the type auto, any, tool or none", param="tool_choice")


def read_messages(
    system: str | Sequence[requests.TextBlock] | None,
    turns: Sequence[requests.InputTurn],
    left_out: list[str],
) -> list[dict[str, Any]]:
    """Messages of a chat; consecutive messages of one role become one.

    Args:
        left_out: gets names for the blocks that this server cannot read.

    Raises:
        BadRequest: a block is malformed, or of no use to the role, or there is none.
    """
    reader = _Reader(left_out)
    if system:
        text = system if isinstance(system, str) else "\n".join(b.text or "" for b in system)
        reader.current("system").texts.append(text)
    for i, turn in enumerate(turns):
        if turn.content is None or isinstance(turn.content, str):
            reader.current(turn.role).texts.append(turn.content or "")
            continue
        for j, block in enumerate(turn.content):
            reader.read(block, turn.role, f"messages[{i}].content[{j}]")
    if all(message.role == "system" for message in reader.messages):
        raise BadRequest("messages has no content", param="messages")
    return [message.whole() for message in reader.messages]


@dataclass
class _Message:
    """A chat message, collected from blocks."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def whole(self) -> dict[str, Any]:
        content = "\n".join(self.texts) if self.texts else None
        thought = {"reasoning_content": "".join(self.thoughts)} if self.thoughts else {}
        return {"role": self.role, "content": content, **thought, **self.fields}


class _Reader:
    def __init__(self, left_out: list[str]):
        self.messages: list[_Message] = []
        self._left_out = left_out

    def current(self, role: str) -> _Message:
        """The message to which the next block of a role belongs."""
        if role == "system" or not self.messages or self.messages[-1].role != role:
            self.messages.append(_Message(role))
        return self.messages[-1]

    def read(self, given: dict[str, Any], role: str, where: str) -> None:
        name = given.get("type")
        kind = requests.BLOCK_KINDS.get(name) if isinstance(name, str) else None
        if name in requests.BLOCKS_OF[role] and kind is not None:
            self._read_known(convert_part(given, kind, where), role, where)
        elif role == "assistant" and isinstance(name, str) and kind is None:
            self.current(role).texts.append(_told(given))
        elif (text := _plain_text(given)) is not None and role == "user":
            self.current(role).texts.append(text)
        elif not isinstance(name, str) or kind is not None or name in _NEEDED:
            problem = f"content of type {name!r} is not supported for the role {role}"
            raise BadRequest(f"{where}: {problem}", param=f"{where}.type")
        else:
            self._left_out.append(f"{where}.{name}")

    def _read_known(self, block: requests.Block, role: str, where: str) -> None:
        match block:
            case requests.TextBlock(text=text):
                self.current(role).texts.append(text or "")
            case requests.ThinkingBlock(thinking=text):
                self.current("assistant").thoughts.append(text or "")
            case requests.ToolUseBlock() as call:
                calls = self.current("assistant").fields.setdefault("tool_calls", [])
                calls.append(tool_call(call.id, call.name, call.input))
            case requests.ToolResultBlock() as result:
                text = self._result(result.content, f"{where}.content")
                fields = {"tool_call_id": result.tool_use_id} if result.tool_use_id else {}
                self.messages.append(_Message("tool", [text], fields=fields))

    def _result(self, content: Any, where: str) -> str:
        """What a tool returned, as text; the model should know of what is no text."""
        content = result_content(content)
        if not isinstance(content, list):
            return content or ""
        texts = []
        for i, given in enumerate(content):
            name = given.get("type")
            if name == "text":
                texts.append(convert_part(given, requests.TextBlock, f"{where}[{i}]").text or "")
            elif (text := _plain_text(given)) is not None:
                texts.append(text)
            elif name in _NEEDED:
                self._left_out.append(f"{where}[{i}].{name}")
                texts.append(f"[{name}]")
            else:
                texts.append(_told(given))
        return "\n".join(texts)


def _plain_text(given: dict[str, Any]) -> str | None:
    """The text of a document or of a result of a search; None if it is none."""
    match given:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            texts = [text]
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            texts = [text]
        case {"type": "document", "source": {"type": "content", "content": list(parts)}} | {
            "type": "search_result",
            "content": list(parts),
        }:
            texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        case _:
            return None
    heads = [
        given[name] for name in ("title", "source", "context") if isinstance(given.get(name), str)
    ]
    return "\n".join(map(str, heads + texts))


def _told(given: dict[str, Any]) -> str:
    """What another server's tool did or found, as text."""
    name, said = given.get("type"), _without_silent(given)
    return f"[{name}: {json.dumps(said, ensure_ascii=False)}]" if said else f"[{name}]"


def _without_silent(value: Any) -> Any:
    if isinstance(value, dict):
        told = {k: v for k, v in value.items() if k not in _SILENT and v not in _NOTHING}
        return {k: _without_silent(v) for k, v in told.items()}
    if isinstance(value, list):
        return [_without_silent(each) for each in value]
    return value
