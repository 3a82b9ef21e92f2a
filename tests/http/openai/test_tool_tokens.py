"""Tool calls over HTTP from a tiny model whose markers of calls are tokens of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncllm import AsyncLLM
from tests.support.models.tiny_models import make
from tests.support.text.tokenizers import with_markers, write_folder

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "city": {"enum": ["Bonn", "Ulm"]}},
    "required": ["yes", "city"],
    "additionalProperties": False,
}
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "weather"}}]
DEEPSEEK = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
#: By format: its markers, and the first of them that a call needs.
FORMATS: dict[str, tuple[tuple[str, ...], str]] = {
    "hermes": (("<tool_call>", "</tool_call>"), "<tool_call>"),
    "mistral": (("[TOOL_CALLS]",), "[TOOL_CALLS]"),
    "deepseek_v31": (tuple(f"<｜tool▁{name}｜>" for name in DEEPSEEK), "<｜tool▁calls▁begin｜>"),
    "harmony": (
        ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "<|channel|>",
    ),
}


def folder_of(
    folder: Path, special: tuple[str, ...], added: tuple[str, ...], ends: list[str]
) -> Path:
    tokenizer = with_markers(special=special, added=added)
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    vocab_size = max(ids.values()) + 1
    make("llama", folder, vocab_size=vocab_size, bos_token_id=0, eos_token_id=1)
    end_ids = [ids[end] for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return write_folder(folder, tokenizer, {"chat_template": template})


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "special") for name in FORMATS), ("hermes", "added")]
)
async def test_calls_are_made(name: str, kind: str, tmp_path: Path) -> None:
    markers, first = FORMATS[name]
    ends = ["<|call|>", "<|return|>"] if name == "harmony" and kind == "special" else ["<|end|>"]
    special, added = (markers, ()) if kind == "special" else ((), markers)
    folder = folder_of(tmp_path, special, added, ends)
    async with (
        AsyncLLM(str(folder), device="cpu", cpu_threads=1, tool_parser=name) as llm,
        TestClient(TestServer(llm.aiohttp_app())) as client,
    ):
        marker = llm.tokenizer.token_id(first)
        for choice in CHOICES:
            for strict in (True, False):
                function = {"name": "weather", "parameters": ARGUMENTS, "strict": strict}
                body: dict[str, Any] = {
                    "messages": [{"role": "user", "content": "Hi"}],
                    "tools": [{"type": "function", "function": function}],
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "max_tokens": 200,
                    "seed": 1,
                }
                if choice == "auto" and (not strict or name == "harmony"):
                    # What the model calls is up to it: it is enough that it may.
                    reply = await client.post(
                        "/v1/chat/completions", json={**body, "max_tokens": 8}
                    )
                    assert reply.status == 200, await reply.text()
                    continue
                if choice == "auto":
                    body["logit_bias"] = {str(marker): 100}
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.status == 200, await reply.text()
                [answer] = (await reply.json())["choices"]
                assert answer["finish_reason"] == "tool_calls"
                [(called, arguments)] = calls_of(answer["message"])
                assert called == "weather"
                assert set(arguments) == {"yes", "city"}
                assert not answer["message"]["content"]
                reply = await client.post("/v1/chat/completions", json={**body, "stream": True})
                lines = (await reply.text()).split("\n\n")[:-2]
                deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
                parts = [call for delta in deltas for call in delta.get("tool_calls") or ()]
                text = "".join(part["function"].get("arguments") or "" for part in parts)
                assert parts[0]["function"]["name"] == "weather"
                assert json.loads(text) == arguments
                assert not any(delta.get("content") for delta in deltas)
