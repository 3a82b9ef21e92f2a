"""Tools of other types than functions, and the items of their calls, as Codex sends them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.http.responses.test_responses import RESPONSES, seen
from tests.support.server.openapi import check
from tests.support.server.serving import Server

PATCH = '*** Begin Patch\n*** Add File: a\n+"é"\n*** End Patch\n'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"}
SHELL: Any = {"type": "function", "name": "shell", "parameters": {}}
CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
SPACE: Any = {
    "type": "namespace",
    "name": "mcp__notes__",
    "description": "Notes.",
    "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "write"},
    ],
}


def says(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>'


def respond(server: Server, text: str, tools: list[Any]) -> list[dict[str, Any]]:
    """The items of an answer, which are the same in a stream."""
    body = {"input": text, "tools": tools}
    answer = server.post(RESPONSES, body)
    assert answer.status == 200, answer.body
    Response.model_validate_json(answer.body, strict=True)
    items: list[dict[str, Any]] = answer.json["output"]
    events = server.post(RESPONSES, body | {"stream": True}).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    streamed = events[-1]["response"]["output"]
    assert [without_id(item) for item in streamed] == [without_id(item) for item in items]
    assert done == streamed
    return items


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "web_search_preview", "search_context_size": "low"},
        {"type": "tool_search"},
        {"type": "image_generation"},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "s", "server_url": "http://s"},
        {"type": "computer_use_preview"},
        {"type": "of_tomorrow", "anything": [1]},
    ],
    ids=lambda tool: tool["type"],
)
def test_tools_that_a_server_would_run_are_left_out_and_named(server: Server, tool: Any) -> None:
    answer = server.post(RESPONSES, {"input": "hi", "tools": [SHELL, tool]})
    assert answer.status == 200
    assert answer.headers["X-Ignored-Parameters"] == f"tools[1].{tool['type']}"
    assert [t["function"]["name"] for t in seen(server)[1]["tools"]] == ["shell"]
    assert answer.json["tools"] == [SHELL, tool]
    alone = server.post(RESPONSES, {"input": "hi", "tools": [tool], "tool_choice": "auto"})
    assert (alone.status, alone.json["tools"]) == (200, [tool])
    assert alone.headers["X-Ignored-Parameters"] == f"tools[0].{tool['type']}"
    assert seen(server)[1]["tools"] is None
    for choice in ("required", {"type": tool["type"]}):
        body = {"input": "hi", "tools": [tool], "tool_choice": choice}
        assert server.post(RESPONSES, body).status == 400


def test_a_custom_tool_takes_text(server: Server) -> None:
    [item] = respond(server, says("apply_patch", {"input": PATCH}), [SHELL, CUSTOM])
    assert item["type"] == "custom_tool_call"
    assert (item["name"], item["input"], item["status"]) == ("apply_patch", PATCH, "completed")
    function = seen(server)[1]["tools"][1]["function"]
    assert GRAMMAR["definition"] in function["description"]
    assert list(function["parameters"]["properties"]) == ["input"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": "a"}, "a"),
        ({"patch": "a"}, "a"),
        ({}, ""),
        ({"a": "b", "c": "d"}, '{"a": "b", "c": "d"}'),
        ({"input": {"a": 1}}, '{"input": {"a": 1}}'),
    ],
    ids=str,
)
def test_whatever_the_model_gives_a_custom_tool(server: Server, arguments: Any, text: str) -> None:
    [item] = respond(server, says("apply_patch", arguments), [CUSTOM])
    assert item["input"] == text


def test_events_of_a_custom_tool_are_openais(client: openai.OpenAI) -> None:
    fields: Any = {"input": says("apply_patch", {"input": PATCH}), "tools": [CUSTOM]}
    events = list(client.responses.create(model="fake", stream=True, **fields))
    [delta] = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
    [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert delta.delta == done.input == PATCH
    assert delta.item_id == done.item_id


def test_the_tools_of_a_namespace(server: Server) -> None:
    text = says("mcp__notes__find", {"a": 1}) + says("mcp__notes__write", {"input": "b"})
    find, write = respond(server, text, [SPACE])
    assert (find["type"], find["namespace"], find["name"]) == (
        *("function_call", "mcp__notes__", "find"),
    )
    assert (write["type"], write["namespace"], write["name"]) == (
        *("custom_tool_call", "mcp__notes__", "write"),
    )
    [item] = respond(server, says("crm__find", {}), [{**SPACE, "name": "crm"}])
    assert (item["namespace"], item["name"]) == ("crm", "find")


def test_a_local_shell(server: Server) -> None:
    command = {"command": ["ls", "-l"], "timeout_ms": 100}
    [item] = respond(server, says("local_shell", command), [{"type": "local_shell"}])
    assert item["type"] == "local_shell_call"
    assert item["action"] == {"type": "exec", "env": {}, **command}


def test_a_search_for_tools_by_the_client(server: Server) -> None:
    search = {"type": "tool_search", "execution": "client"}
    [item] = respond(server, says("tool_search", {"query": "notes"}), [search])
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "notes"}
    found = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [SPACE]}
    ask = {"role": "user", "content": says("mcp__notes__find", {})}
    answer = server.post(RESPONSES, {"input": [item, found, ask], "tools": [search]})
    assert answer.json["output"][0]["namespace"] == "mcp__notes__"
    messages, options = seen(server)
    assert messages[1]["content"] == "Found: mcp__notes__find, mcp__notes__write"
    names = [tool["function"]["name"] for tool in options["tools"]]
    assert names == ["tool_search", "mcp__notes__find", "mcp__notes__write"]


def test_tools_among_the_items(server: Server) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [CUSTOM, SPACE]}
    ask = {"role": "user", "content": says("apply_patch", {"input": "a"})}
    answer = server.post(RESPONSES, {"input": [more, ask], "tools": []})
    assert answer.json["output"][0]["type"] == "custom_tool_call"
    again = {"previous_response_id": answer.json["id"], "input": says("mcp__notes__find", {})}
    assert server.post(RESPONSES, again).json["output"][0]["namespace"] == "mcp__notes__"


def test_a_choice_of_a_tool(server: Server) -> None:
    tools = [SHELL, CUSTOM, SPACE]
    body = {"input": says("apply_patch", {"input": "a"}), "tools": tools}
    for choice in (
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "find", "namespace": "mcp__notes__"},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "custom", "name": "apply_patch"}],
        },
    ):
        assert server.post(RESPONSES, body | {"tool_choice": choice}).status == 200
    for choice in ({"type": "custom", "name": "shell"}, {"type": "web_search"}):
        assert server.post(RESPONSES, body | {"tool_choice": choice}).status == 400


def test_a_choice_among_tools_of_which_some_are_left_out(server: Server) -> None:
    search = {"type": "web_search"}
    body = {"input": says("apply_patch", {"input": "a"}), "tools": [search, CUSTOM, SHELL]}
    allowed = {"type": "allowed_tools", "mode": "auto"}
    tools = [search, {"type": "custom", "name": "apply_patch"}]
    answer = server.post(RESPONSES, body | {"tool_choice": {**allowed, "tools": tools}})
    assert answer.json["output"][0]["type"] == "custom_tool_call"
    names = "tools[0].web_search, tool_choice.tools[0].web_search"
    assert answer.headers["X-Ignored-Parameters"] == names
    for refused in ([search], [{"type": "mcp"}, *tools]):
        choice = {**allowed, "tools": refused}
        assert server.post(RESPONSES, body | {"tool_choice": choice}).status == 400


def test_calls_and_results_of_every_kind_are_read_back(server: Server) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    action: dict[str, Any] = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Q"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "patched"},
        {
            "type": "function_call",
            "call_id": "2",
            "namespace": "mcp__notes__",
            "name": "find",
            "arguments": '{"a": ',
        },
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "found"}, image],
        },
        {"type": "local_shell_call", "call_id": "3", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "3", "output": "a b"},
        {"type": "shell_call", "call_id": "4", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "4", "output": [{"stdout": "/home"}]},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "news"}},
        {"type": "mcp_call", "id": "m", "name": "get", "server_label": "s", "output": "42"},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "c"}},
        {"role": "user", "content": "go on"},
    ]
    answer = server.post(RESPONSES, {"input": items, "tools": [CUSTOM, SPACE]})
    assert answer.status == 200, answer.body
    assert answer.headers["X-Ignored-Parameters"] == (
        "input[5].output[1].input_image, input[12].ghost_snapshot"
    )
    messages, _ = seen(server)
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    assert calls == [
        ("apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False)),
        ("mcp__notes__find", '{"a": '),
        ("local_shell", '{"command": ["ls"]}'),
        ("shell", '{"action": {"commands": ["pwd"]}}'),
    ]
    results = [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
    assert results == [
        *(("1", "patched"), ("2", "found\n[input_image]"), ("3", "a b")),
        ("4", '{"stdout": "/home"}'),
    ]
    said = " ".join(str(message["content"]) for message in messages)
    assert "news" in said
    assert "42" in said


def test_calls_and_results_without_ids(server: Server) -> None:
    call = {"type": "function_call", "name": "shell", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "name": "edit", "input": "x", "call_id": None}
    results = [
        {"type": f"{kind}_output", "output": kind} for kind in (call["type"], custom["type"])
    ]
    told = {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "Win."}
    given = [{"role": "user", "content": None}, call, custom, *results, told]
    assert server.post(RESPONSES, {"input": given}).status == 200
    user, answer, *others = seen(server)[0]
    assert (user["role"], user["content"]) == ("user", "")
    ids = [each["id"] for each in answer["tool_calls"]]
    assert len(set(ids)) == 2
    assert [(other["role"], other["content"]) for other in others] == [
        ("tool", "function_call"),
        ("tool", "custom_tool_call"),
        ("user", "<goal>\nWin.\n</goal>"),
    ]


def test_a_result_alone_goes_on_with_a_conversation(server: Server) -> None:
    said = says("local_shell", {"command": ["ls"]})
    made = server.post(RESPONSES, {"input": said, "tools": [{"type": "local_shell"}]}).json
    [call] = made["output"]
    result = {"type": "local_shell_call_output", "id": call["call_id"], "output": "a b"}
    body = {"previous_response_id": made["id"], "input": [result]}
    assert server.post(RESPONSES, body).status == 200
    last = {"role": "tool", "tool_call_id": call["call_id"], "content": "a b"}
    assert seen(server)[0][-1] == last


def test_kept_items_are_listed_as_described(server: Server, document: dict[str, Any]) -> None:
    items: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "patched"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": []}},
        {"type": "additional_tools", "tools": [CUSTOM]},
        {"role": "user", "content": "go on"},
    ]
    id = server.post(RESPONSES, {"input": items}).json["id"]
    answer = server.get(f"{RESPONSES}/{id}/input_items?order=asc")
    check(document, "GET", f"{RESPONSES}/{id}/input_items", answer)
    kinds = [item["type"] for item in answer.json["data"]]
    assert kinds == [item.get("type", "message") for item in items]


def test_reasoning_comes_back_from_clients_that_keep_it(server: Server) -> None:
    body: dict[str, Any] = {"input": "<think>Hm, é.</think>Here.", "store": False}
    [plain, _] = server.post(RESPONSES, body).json["output"]
    assert "encrypted_content" not in plain
    body["include"] = ["reasoning.encrypted_content"]
    [thought, text] = server.post(RESPONSES, body).json["output"]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    again = [{"role": "user", "content": "Q"}, kept, text, {"role": "user", "content": "next"}]
    server.post(RESPONSES, {"input": again})
    assert seen(server)[0][1]["reasoning_content"] == "Hm, é."


CONVERSATION: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"type": "function_call", "call_id": "1", "name": "shell", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "ok"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_compaction_among_responses(server: Server, stream: bool) -> None:
    trigger = {"type": "compaction_trigger"}
    body = {"input": [*CONVERSATION, trigger], "tools": [SHELL], "stream": stream, "store": False}
    answer = server.post(RESPONSES, body)
    response = answer.events[-1]["response"] if stream else answer.json
    [item] = response["output"]
    assert (item["type"], response["status"]) == ("compaction", "completed")
    if stream:
        kinds = [event["type"].removeprefix("response.") for event in answer.events]
        assert kinds == [
            *("created", "in_progress", "output_item.added", "output_item.done", "completed")
        ]
        assert answer.events[-2]["item"] == item
    messages, options = seen(server)
    assert [m["content"] for m in messages[:-1]] == [
        *("Be brief.", "One?", None, "ok", "Two.", "Three?")
    ]
    assert [tool["function"]["name"] for tool in options["tools"]] == ["shell"]
    asked = messages[-1]["content"]
    server.post(RESPONSES, {"input": [item, {"role": "user", "content": "Go on."}]})
    summary, ask = seen(server)[0]
    assert summary["content"].endswith(asked)  # which is what this model says
    assert ask == {"role": "user", "content": "Go on."}


def test_compacting(server: Server, client: openai.OpenAI, document: dict[str, Any]) -> None:
    body = {"input": CONVERSATION, "instructions": "Be nice.", "tools": [SHELL]}
    answer = server.post(f"{RESPONSES}/compact", body)
    check(document, "POST", f"{RESPONSES}/compact", answer)
    *users, item = answer.json["output"]
    assert [user["content"][0]["text"] for user in users] == ["One?", "Three?"]
    assert item["type"] == "compaction"
    compacted = client.responses.compact(model="fake", input=CONVERSATION)
    assert [each.type for each in compacted.output] == ["message", "message", "compaction"]
    kept = server.post(RESPONSES, {"input": "One?"}).json["id"]
    again = server.post(f"{RESPONSES}/compact", {"previous_response_id": kept})
    assert [each["type"] for each in again.json["output"]] == ["message", "compaction"]
    assert server.post(f"{RESPONSES}/compact", {}).status == 400


def test_a_conversation_that_is_too_long_is_compacted_without_its_beginning(server: Server) -> None:
    turns = [{"role": "user", "content": f"{i} {'a' * 400}"} for i in range(12)]
    plain = server.llm.chat_template
    try:
        server.llm.chat_template = type(plain).__mro__[1]()  # prints all messages
        answer = server.post(f"{RESPONSES}/compact", {"input": turns})
    finally:
        server.llm.chat_template = plain
    assert answer.status == 200, answer.body
    assert answer.json["output"][-1]["type"] == "compaction"


def test_foreign_compactions_are_left_out(server: Server) -> None:
    for sealed in ("gAAAAABo", "asyncllm1.###", None):
        item = {"type": "compaction", "encrypted_content": sealed}
        answer = server.post(RESPONSES, {"input": [item, *CONVERSATION]})
        assert answer.status == 200
        assert answer.headers["X-Ignored-Parameters"] == "input[0].compaction"


def test_managing_the_context_is_named(server: Server) -> None:
    body = {"input": "a", "context_management": [{"type": "compaction", "compact_threshold": 9}]}
    answer = server.post(RESPONSES, body | {"reasoning": {"summary": "none"}})
    assert answer.status == 200
    assert answer.headers["X-Ignored-Parameters"] == "context_management, reasoning.summary"
