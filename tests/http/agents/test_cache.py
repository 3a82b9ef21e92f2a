"""What the engine's own prefix cache finds of agents' prompts, with the built-in model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.agents.test_recipes import SHARE, tell
from tests.support.server.agent import RULES
from tests.support.server.agents import AGENTS
from tests.support.server.serving import Server


@pytest.mark.parametrize("name", ["claude_code", "codex", "langgraph"])
def test_the_former_turn_is_found_in_the_cache(demo: Server, name: str) -> None:
    agent = AGENTS[name](f"Of {name}: {RULES[:600]}")
    former = 0
    for turn, _ in enumerate(tell(agent, reasons=False)):
        path, body = agent.request()
        answer = demo.post(path, body | {"model": "asyncllm-demo", "stream": False})
        assert answer.status == 200, answer.body
        tokens, cached = counted(answer.json["usage"])
        assert cached >= SHARE * former, (turn, tokens, cached)
        former = tokens
        if turn == 1:
            break


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were cached, as each API says it."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "cache_read_input_tokens" in usage:
        new = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return new + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
