"""A tool loop over chat completions, Messages, Responses and Ollama gives the same prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.text import ChatTemplate
from asyncllm.text.parsing import TOOL_FORMATS, Formats
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server
from tests.support.text.conversations import FAMILIES, template_of

#: Arguments that a model may have written, as text.
ARGUMENTS = ['{"city": "Zu', "null", "", '{"p": "C:\\Users\\x"}', "[1]", '"text"', "{'a': 1}"]


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    return lambda: FakeLLM(formats=Formats(TOOL_FORMATS["hermes"]))


def loop(api: str, arguments: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request after a call and its result."""
    match api:
        case "chat":
            function = {"name": "find", "arguments": arguments}
            call = {"id": "call_1", "type": "function", "function": function}
            messages = [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "here"},
            ]
            return "/v1/chat/completions", {"messages": messages, "max_tokens": 2}
        case "messages":
            use = {"type": "tool_use", "id": "call_1", "name": "find", "input": parsed(arguments)}
            answer = {"type": "tool_result", "tool_use_id": "call_1", "content": "here"}
            messages = [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [answer]},
            ]
            return "/v1/messages", {"messages": messages, "max_tokens": 2}
        case "responses":
            items = [
                {"role": "user", "content": "Where?"},
                {
                    "type": "function_call",
                    "call_id": "call_1",
                    "name": "find",
                    "arguments": arguments,
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "here"},
            ]
            return "/v1/responses", {"input": items, "max_output_tokens": 2}
        case _:
            function = {"name": "find", "arguments": parsed(arguments)}
            messages = [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
                {"role": "tool", "tool_name": "find", "content": "here"},
            ]
            options = {"num_predict": 2}
            return "/api/chat", {"model": "fake", "messages": messages, "options": options}


def parsed(arguments: str) -> Any:
    """As an API has it that sends no text: the object, or what else there is."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def prompt(server: Server, api: str, arguments: str = '{"key": 1}') -> str:
    path, body = loop(api, arguments)
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert "X-Ignored-Parameters" not in answer.headers
    return server.llm.encoded[-1]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, server: Server) -> str:
    server.llm.chat_template = template_of(request.param)  # type: ignore[assignment]
    name: str = request.param
    return name


def test_every_api_gives_the_same_prompt(server: Server, family: str) -> None:
    expected = prompt(server, "chat")
    assert {prompt(server, api) for api in ("messages", "responses")} == {expected}
    assert "here" in expected
    made = prompt(server, "ollama")  # which has no ids
    assert made == (expected if "c.id" not in FAMILIES[family] else made)


def test_arguments_that_are_no_object_do_not_end_a_conversation(
    server: Server, family: str
) -> None:
    for arguments in ARGUMENTS:
        for api in ("chat", "messages", "responses", "ollama"):
            assert "here" in prompt(server, api, arguments)
    assert prompt(server, "chat", "null") == prompt(server, "chat", "{}")


def test_a_name_that_is_null_does_not_end_a_conversation(server: Server, family: str) -> None:
    for api in ("chat", "messages", "responses", "ollama"):
        path, body = loop(api, '{"key": 1}')
        answer = server.post(path, json.loads(json.dumps(body).replace('"find"', "null")))
        assert answer.status == 200, answer.body
        assert "here" in server.llm.encoded[-1]


def test_text_that_is_null_is_empty(server: Server, family: str) -> None:
    for path, field in (
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ):
        for text in ("", None):
            kind = "input_text" if field == "input" else "text"
            parts = [{"type": kind, "text": text}, {"type": kind, "text": "hi"}]
            length = "max_output_tokens" if field == "input" else "max_tokens"
            answer = server.post(path, {field: [{"role": "user", "content": parts}], length: 2})
            assert answer.status == 200, answer.body
        assert server.llm.encoded[-1] == server.llm.encoded[-2]


def test_refusals_are_text(server: Server, family: str) -> None:
    refusal: Any
    for refusal in (
        {"content": [{"type": "refusal", "refusal": "I do not."}]},
        {"content": None, "refusal": "I do not."},
        {"content": "I do not."},
    ):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", **refusal}]
        body = {"messages": [*messages, {"role": "user", "content": "b"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body).status == 200
    assert len(set(server.llm.encoded[-3:])) == 1
    assert "I do not." in server.llm.encoded[-1]


def test_a_system_message_in_mid_conversation(server: Server, family: str) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "A note."},
        {"role": "user", "content": "go on"},
    ]
    items = [{"role": "system", "content": "S"}, *turns]
    for path, body in (
        ("/v1/chat/completions", {"messages": items, "max_tokens": 2}),
        ("/v1/messages", {"system": "S", "messages": turns, "max_tokens": 2}),
        ("/v1/responses", {"instructions": "S", "input": turns, "max_output_tokens": 2}),
        ("/api/chat", {"model": "fake", "messages": items, "options": {"num_predict": 2}}),
    ):
        assert server.post(path, body).status == 200
    assert len(set(server.llm.encoded[-4:])) == 1
    assert "A note." in server.llm.encoded[-1]


def test_text_beside_a_result(server: Server, family: str) -> None:
    path, body = loop("messages", "{}")
    body["messages"][-1]["content"].append({"type": "text", "text": "And now?"})
    assert server.post(path, body).status == 200
    assert "And now?" in server.llm.encoded[-1]


def test_tools_of_another_kind_are_left_out_and_named(server: Server) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    function = {"type": "function", "function": {"name": "find"}}
    tools: list[Any] = [{"type": "web_search"}, function, {"type": "mcp", "server_label": "s"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = server.post("/v1/chat/completions", body | {"tools": tools})
    assert answer.status == 200
    assert answer.headers["X-Ignored-Parameters"] == "tools[0].web_search, tools[2].mcp"
    made = server.llm.encoded[-1]
    assert server.post("/v1/chat/completions", body | {"tools": [function]}).status == 200
    assert server.llm.encoded[-1] == made
    untyped = {"function": {"name": "find"}}
    assert server.post("/v1/chat/completions", body | {"tools": [untyped]}).status == 200
    assert server.llm.encoded[-1] == made
    allowed = {"mode": "auto", "tools": tools[:2]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    some = server.post("/v1/chat/completions", body | {"tools": tools[:2], "tool_choice": choice})
    names = "tools[0].web_search, tool_choice.allowed_tools.tools[0].web_search"
    assert (some.status, some.headers["X-Ignored-Parameters"]) == (200, names)
    assert server.llm.encoded[-1] == made
    alone = server.post("/v1/chat/completions", body | {"tools": tools[:1], "tool_choice": "auto"})
    assert (alone.status, alone.headers["X-Ignored-Parameters"]) == (200, "tools[0].web_search")
    assert server.post("/v1/chat/completions", body).status == 200
    assert server.llm.encoded[-1] == server.llm.encoded[-2]


def test_calls_and_results_as_messages_has_them_are_read_in_chats(
    server: Server, family: str
) -> None:
    _, body = loop("messages", '{"key": 1}')
    body["messages"][1]["content"].insert(0, {"type": "text", "text": "I look."})
    body["messages"][2]["content"].append({"type": "text", "text": "And now?"})
    prompts = set()
    for path in ("/v1/messages", "/v1/chat/completions"):
        answer = server.post(path, body)
        assert answer.status == 200, answer.body
        assert "X-Ignored-Parameters" not in answer.headers
        prompts.add(server.llm.encoded[-1])
    [prompt] = prompts
    assert all(text in prompt for text in ("I look.", "here", "And now?"))


#: One function in the forms of the three APIs, and a choice of it.
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}},
    {"function": {"name": "find", "parameters": PARAMETERS}},
    {"type": "function", "name": "find", "parameters": PARAMETERS},
    {"name": "find", "input_schema": PARAMETERS},
    {"type": "custom", "name": "find", "input_schema": PARAMETERS},
]
CHOICES: list[Any] = [
    "auto",
    {"type": "auto"},
    {"type": "any"},
    {"type": "function", "function": {"name": "find"}},
    {"type": "function", "name": "find"},
]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_functions_and_choices_in_the_forms_of_any_api(server: Server, api: str) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    path, body = loop(api, "{}")
    prompts = set()
    for tool in FUNCTIONS:
        for choice in CHOICES:
            answer = server.post(path, body | {"tools": [tool], "tool_choice": choice})
            assert answer.status == 200, answer.body
            assert "X-Ignored-Parameters" not in answer.headers
            prompts.add(server.llm.encoded[-1])
    [prompt] = prompts
    assert '"city"' in prompt


@pytest.mark.parametrize("text", ["a", "", None, {"lines": 1}])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_calls_of_tools_that_take_text(server: Server, api: str, text: Any) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    path, body = loop(api, "{}")
    if api == "chat":
        custom = {"name": "apply_patch", "input": text}
        call = {"id": "call_1", "type": "custom", "custom": custom, "function": None}
        body["messages"][1]["tool_calls"] = [call]
    else:
        call = {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch"}
        body["input"][1] = {**call, "input": text}
    assert server.post(path, body).status == 200
    assert '"name": "apply_patch"' in server.llm.encoded[-1]


def test_what_is_no_text_is_left_out_of_answers_and_results(server: Server) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    _, body = loop("chat", "{}")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    thought = {"type": "thinking", "thinking": "Hm."}
    body["messages"][1]["content"] = [thought, {"type": "text", "text": "I look."}]
    body["messages"][2]["content"] = [{"type": "text", "text": "here"}, image]
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200
    names = "messages[1].content[0].thinking, messages[2].content[1].image_url"
    assert answer.headers["X-Ignored-Parameters"] == names
    assert "here\n[image_url]" in server.llm.encoded[-1]
    assert "I look." in server.llm.encoded[-1]
    body["messages"][0]["content"] = [image]
    assert server.post("/v1/chat/completions", body).status == 400


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"found": [1, "ä"]}, '{"found": [1, "ä"]}'),
        (["a", "b"], '["a", "b"]'),
        (42, "42"),
        (False, "false"),
        ([{"text": "untyped"}], '[{"text": "untyped"}]'),
    ],
)
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_results_that_are_other_json_are_text(
    server: Server, api: str, result: Any, told: str
) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    path, body = loop(api, "{}")
    message = body["messages"][2]
    holder = message if api == "chat" else message["content"][0]
    assert "content" in holder
    holder["content"] = result
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert told in server.llm.encoded[-1]


def test_parts_of_the_responses_api_are_text(server: Server) -> None:
    server.llm.chat_template = ChatTemplate(FAMILIES["qwen2"])  # type: ignore[assignment]
    messages = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Here."}]},
        {"role": "user", "content": "Why?"},
    ]
    assert server.post("/v1/chat/completions", {"messages": messages}).status == 200
    assert all(text in server.llm.encoded[-1] for text in ("Where?", "Here.", "Why?"))
