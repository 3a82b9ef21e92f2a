"""Ten turns as agents hold them, on a template of every family.

No request is refused, no text is lost, and the prefix cache serves what the former turn had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import msgspec
import pytest

from asyncllm.server.responses.item_schemas import seal
from asyncllm.text.parsing import TOOL_FORMATS, Formats
from tests.support.server.agent import RULES, Agent, Call
from tests.support.server.agents import AGENTS, Codex
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server
from tests.support.text.conversations import FAMILIES, template_of

#: Of the former turn's tokens, how many must be found in the cache.
SHARE = 0.95


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    def make() -> FakeLLM:
        llm = FakeLLM(formats=Formats(TOOL_FORMATS["hermes"]))
        llm.limits = msgspec.structs.replace(
            llm.limits, max_model_len=1 << 20, max_waiting_tokens=1 << 22
        )
        return llm

    return make


def long(text: str) -> str:
    return f"{text} {'and so on, ' * 20}"


def tell(agent: Agent, *, reasons: bool) -> Iterator[bool]:
    """What happens; yields when the model is asked, and whether the conversation is a new one.

    Args:
        reasons: agents send the model's reasoning back.
    """

    def say(text: str) -> str:
        agent.said.append(text)
        return long(text)

    def thought() -> str | None:
        return long("Hm.") if reasons else None

    def call(name: str, path: str) -> Call:
        return Call(name, json.dumps({"path": path}))

    agent.user(say("First question."))
    yield True
    agent.answer(say("I look at both."), [call("read", "a.py"), call("read", "b.py")], thought())
    agent.results([say("Of a."), say('Of "b":\n\tdef b(): ...')])
    yield False
    agent.answer(None, [call("read", "c.py")], thought())
    agent.results([say("Of c.")])
    agent.note(say("Remember the tests."))
    yield False
    agent.answer(say("I edit."), [Call("edit", '{"path": "a.py", "new": "def')], None)
    agent.interrupt(say("Stop, not that."))
    yield False
    agent.answer(say("I stopped."), [], None)
    agent.user(say("Second question."))
    yield False
    agent.answer(None, [Call("read", "{'path': 'd.py'}"), Call("read", "null")], None)
    agent.results([say("No such tool call."), say("A path is required.")])
    yield False
    agent.answer(say("It is there."), [], None)
    agent.note(say("A file has changed."))
    agent.user(say("Third question."))
    yield False
    summary = "All of the above, in short."
    agent.said.clear()
    agent.compact(seal(summary) if isinstance(agent, Codex) else summary)
    agent.said.append(summary)
    agent.user(say("Fourth question."))
    yield True
    calls = [call("read", "e.py"), call("edit", "f.py"), call("read", "g.py")]
    agent.answer(say("Three at once."), calls, thought())
    agent.results([say("Of e."), say("Of f."), say("Of g.")])
    yield False
    agent.answer(say("Done."), [], None)
    agent.user(say("Fifth question."))
    yield False


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", AGENTS)
def test_ten_turns(server: Server, name: str, family: str) -> None:
    check(server, AGENTS[name](), family, reasons=False)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral", "granite"])
@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode", "open_webui"])
def test_ten_turns_with_reasoning(server: Server, name: str, family: str) -> None:
    """Qwen 3 and gpt-oss leave out reasoning once the user goes on, so prompts change there."""
    check(server, AGENTS[name](RULES * 12), family, reasons=True)


def check(server: Server, agent: Agent, family: str, *, reasons: bool) -> None:
    server.llm.chat_template = template_of(family)  # type: ignore[assignment]
    turns = 0
    former: bytes = b""
    for is_new in tell(agent, reasons=reasons):
        turns += 1
        path, body = agent.request()
        answer = server.post(path, body)
        assert answer.status == 200, answer.body
        ignored = answer.headers.get("X-Ignored-Parameters")
        assert frozenset(ignored.split(", ") if ignored else ()) == agent.ignored
        prompt = server.llm.encoded[-1]
        assert not [text for text in agent.said if not _holds(prompt, text)], prompt
        tokens = prompt.encode()
        if not is_new:
            common = _common(former, tokens)
            assert common >= SHARE * len(former), (turns, common, len(former))
        former = tokens
    assert turns == 10


def _holds(prompt: str, text: str) -> bool:
    """As it is, or as JSON."""
    return text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt


def _common(one: bytes, two: bytes) -> int:
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
