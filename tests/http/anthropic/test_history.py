"""What Claude Code and others send along: tools of Anthropic's servers, and blocks about them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.text import ChatTemplate
from tests.http.anthropic.test_anthropic import COUNT, HI, MESSAGES, TOOLS
from tests.http.responses.test_responses import seen
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving
from tests.support.text.conversations import FAMILIES

BILLING = "x-anthropic-billing-header: cc_version=2.1.208.{n}; cc_entrypoint=cli; cch={n};"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
NOTES = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "Buy milk."}}


def send(server: Server, messages: Any, **fields: Any) -> Any:
    return server.post(MESSAGES, {"messages": messages, "max_tokens": 9, **fields})


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "web_fetch_20260318", "name": "web_fetch", "cache_control": {"ttl": "of today"}},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "notes"},
        {"type": "of_tomorrow_20300101", "anything": [1]},
    ],
    ids=lambda tool: tool["type"],
)
def test_tools_of_anthropics_servers_are_left_out_and_named(server: Server, tool: Any) -> None:
    for path in (MESSAGES, COUNT):
        body = {"messages": HI, "max_tokens": 9, "tools": [TOOLS[0], tool, TOOLS[1]]}
        answer = server.post(path, body)
        assert answer.status == 200
        named = answer.headers["X-Ignored-Parameters"].split(", ")
        assert f"tools[1].{tool['type']}" in named
        assert [t["function"]["name"] for t in seen(server)[1]["tools"]] == ["add", "wait"]
    alone = send(server, HI, tools=[tool], tool_choice={"type": "auto"})
    assert alone.status == 200
    assert f"tools[0].{tool['type']}" in alone.headers["X-Ignored-Parameters"].split(", ")
    assert seen(server)[1]["tools"] is None
    assert send(server, HI, tools=[tool], tool_choice={"type": "any"}).status == 400
    choice = {"type": "tool", "name": "web_search"}
    assert send(server, HI, tools=[tool], tool_choice=choice).status == 400
    assert send(server, HI, tools=[*TOOLS, tool], tool_choice=choice).status == 400


def test_what_servers_did_is_told(server: Server) -> None:
    hit = {
        "type": "web_search_result",
        "title": "Rain",
        "url": "http://w",
        "encrypted_content": "E",
    }
    answer = send(
        server,
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {
                        "type": "server_tool_use",
                        "id": "srvtoolu_1",
                        "name": "web_search",
                        "input": {"query": "weather"},
                    },
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "srvtoolu_1",
                        "content": [hit],
                    },
                    {
                        "type": "bash_code_execution_tool_result",
                        "tool_use_id": "srvtoolu_2",
                        "content": {"type": "bash_code_execution_result", "stdout": "42"},
                    },
                    {"type": "mcp_tool_use", "id": "m", "name": "get", "input": {"a": "b"}},
                    {"type": "of_tomorrow", "text": "new"},
                    {"type": "redacted_thinking", "data": "secret"},
                    {"type": "text", "text": "It rains."},
                ],
            },
            {"role": "user", "content": "And now?"},
        ],
    )
    assert answer.status == 200, answer.body
    said = seen(server)[0][1]["content"]
    for text in ("I look.", "weather", "Rain", "http://w", "42", "get", "new", "It rains."):
        assert text in said
    assert "srvtoolu" not in said
    assert "secret" not in said
    assert '"E"' not in said


def test_blocks_of_a_user_and_of_results(server: Server) -> None:
    found = {"type": "search_result", "title": "T", "source": "s", "content": [{"text": "found"}]}
    parts = [{"type": "text", "text": "here"}, IMAGE, PDF, NOTES, found]
    parts.append({"type": "tool_reference", "tool_name": "later", "cache_control": {"ttl": [1]}})
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    turns = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, NOTES, {"type": "container_upload", "file_id": "f"}]},
    ]
    answer = send(server, turns, tools=TOOLS)
    assert answer.status == 200, answer.body
    assert answer.headers["X-Ignored-Parameters"] == (
        "messages[2].content[0].content[1].image, messages[2].content[0].content[2].document, "
        "messages[2].content[2].container_upload"
    )
    tool, user = seen(server)[0][-2:]
    assert tool["content"] == (
        'here\n[image]\n[document]\nNotes\nBuy milk.\nT\ns\nfound\n[tool_reference: {"tool_name": '
        '"later"}]'
    )
    assert user["content"] == "Notes\nBuy milk."
    for block in (IMAGE, PDF):
        assert send(server, [{"role": "user", "content": [block]}]).status == 400


@pytest.mark.parametrize(
    "shape",
    [
        lambda head, rest: [{"type": "text", "text": head}, {"type": "text", "text": rest}],
        lambda head, rest: f"{head}\n{rest}",
        lambda head, rest: [{"type": "text", "text": f"{head}\n{rest}"}],
    ],
    ids=["blocks", "text", "block"],
)
def test_claude_codes_billing_line_is_not_in_the_prompt(server: Server, shape: Any) -> None:
    rest = "You are Claude Code.\n\nx-anthropic-billing-header: is a line."
    prompts = []
    for n in ("1a2", "b3c"):
        system = shape(BILLING.format(n=n), rest)
        assert send(server, HI, system=system).status == 200
        prompts.append(seen(server)[0][0])
    assert prompts == [{"role": "system", "content": rest}] * 2
    assert send(server, HI, system=BILLING).status == 200
    assert [message["role"] for message in seen(server)[0]] == ["user"]


def test_the_line_is_dropped_from_other_apis_too() -> None:
    """As programs that translate from one to the other send it."""
    with serving(FakeLLM) as server:
        server.llm.chat_template = ChatTemplate(FAMILIES["chatml"])  # type: ignore[assignment]
        system = {"role": "system", "content": f"{BILLING}\nBe brief."}
        body = {"messages": [system, *HI], "max_tokens": 2}
        assert server.post("/v1/chat/completions", body).status == 200
        assert server.llm.encoded[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_editing_the_context_is_named(server: Server) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = send(server, HI, context_management=edits)
    assert (answer.status, answer.headers["X-Ignored-Parameters"]) == (200, "context_management")
