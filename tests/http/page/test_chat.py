"""The page's chat, in a browser; the fake model says what the user says last."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Formats
from tests.support.server.browser import BrowserError, Tab
from tests.support.server.fake_llm import FakeLLM, FakeTemplate
from tests.support.server.serving import Server, serving

ANSWERED = "!document.querySelector('.growing') && document.querySelector('.assistant .actions')"
BODY = ".message.assistant .body"
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class LastMessage(FakeTemplate):
    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.seen = (messages, options)
        text: str = messages[-1]["content"]
        return text


def parrot() -> FakeLLM:
    llm = FakeLLM(
        formats=Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]), step_seconds=0.001
    )
    llm.chat_template = LastMessage()
    return llm


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    return parrot


@pytest.fixture
def chat(tab: Tab, server: Server) -> Tab:
    tab.open(f"{server.url}/")
    tab.until("document.querySelector('select[name=model]').value === 'fake'")
    return tab


def ask(tab: Tab, text: str) -> None:
    tab.click("#draft")
    tab.type(text)
    tab.press("Enter")


def test_an_answer_streams_and_is_kept(chat: Tab, server: Server) -> None:
    ask(chat, "Some `code`\n\nand\n```py\nx = 1\n```\nafter")
    chat.until(ANSWERED)
    assert chat.text(f"{BODY} .code-block pre") == "x = 1\n"
    assert chat.js(f"document.querySelector('{BODY} p code').textContent") == "code"
    assert "after" in chat.text(BODY)
    assert "tokens" in chat.text(".assistant .actions")
    body = server.llm.params[-1]
    assert body.logprobs == 5
    chat.hover(f"{BODY} .token")
    assert "60.7 %" in chat.until_text("#tip", "%"), "exp(-0.5)"
    chat.click(".assistant .actions button:first-child")
    chat.until_text(".assistant .actions", "Copied")
    chat.reload()
    chat.until_text(BODY, "after")
    chat.click("#new")
    assert "Ask away" in chat.text("#messages")


def test_settings_reach_the_server_and_are_kept(chat: Tab, server: Server) -> None:
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 3, "seed": 11}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    for name, value in (wanted | penalties).items():
        chat.click(f"[name={name}]")
        chat.type(str(value))
    chat.click("[name=system]")
    chat.type("Be brief.")
    chat.click("[name=logprobs]")
    chat.reload()
    chat.until("document.querySelector('[name=seed]').value === '11'")
    ask(chat, "hello")
    chat.until(ANSWERED)
    params = server.llm.params[-1]
    assert {name: getattr(params, name) for name in wanted | penalties} == wanted | penalties
    assert params.logprobs is None
    template = server.llm.chat_template
    assert template is not None
    assert template.seen[0][0] == {"role": "system", "content": "Be brief."}
    assert chat.text(BODY) == "hel"
    assert "length" in chat.text(".assistant .actions")


def test_settings_changed_during_an_answer_are_for_the_next(chat: Tab, server: Server) -> None:
    for checked in (False, True):
        chat.js(f"document.querySelector('[name=logprobs]').checked = {json.dumps(checked)}")
        ask(chat, "0123456789 " * 15)
        chat.until_text(".assistant:last-child .body", "0123")
        chat.js("document.querySelector('[name=logprobs]').click()")
        chat.until(ANSWERED)
        assert chat.text(".assistant:last-child .body").strip() == ("0123456789 " * 15).strip()
        tokens = chat.js("document.querySelectorAll('.assistant:last-child .body .token').length")
        assert bool(tokens) == checked


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stopping_aborts_the_request(chat: Tab, server: Server, how: str) -> None:
    aborted = len(server.llm.aborted)
    ask(chat, "0123456789 " * 300)
    chat.until_text(BODY, "0123")
    if how == "escape":
        chat.press("Escape")
    else:
        chat.click("#stop")
    chat.until_text(".assistant .actions", "stopped")
    server.until(lambda: len(server.llm.aborted) > aborted)
    assert len(chat.text(BODY)) < 3000
    server.until_idle()


def test_regenerating_replaces_the_answer(chat: Tab, server: Server) -> None:
    before = len(server.llm.params)
    ask(chat, "again")
    chat.until(ANSWERED)
    chat.click("#again")
    server.until(lambda: len(server.llm.params) == before + 2)
    chat.until(ANSWERED)
    assert chat.js("document.querySelectorAll('.message').length") == 2


def test_a_message_is_edited_and_sent_again(chat: Tab, server: Server) -> None:
    for text in ("one", "two", "three"):
        ask(chat, text)
        chat.until(ANSWERED)
    chat.js("document.querySelectorAll('.user .actions button')[2].click()")
    assert chat.js("document.activeElement.value") == "two"
    chat.press("Escape")
    assert chat.js("document.activeElement.textContent") == "Edit"
    chat.press("Enter")
    chat.press("Enter", shift=True)
    chat.type("and more")
    chat.press("Enter")
    chat.until("document.querySelectorAll('.message').length === 4")
    chat.until(ANSWERED)
    assert server.llm.chat_template is not None
    sent = [message["content"] for message in server.llm.chat_template.seen[0]]
    assert sent == ["one", "one", "two\nand more"]
    assert chat.js("[...document.querySelectorAll('.user .body')].at(-1).innerText") == sent[-1]
    assert chat.js("document.activeElement.id") == "draft"


def test_an_error_has_a_button_to_try_again(chat: Tab, server: Server) -> None:
    server.llm.fail = RuntimeError("planted")
    ask(chat, "again")
    chat.until("document.querySelector('.assistant .error button:not(:disabled)')")
    server.llm.fail = None
    chat.click_text(".assistant .error button", "Retry")
    chat.until_text(BODY, "again")
    chat.until(ANSWERED)
    assert chat.js("document.querySelectorAll('.message').length") == 2
    assert not chat.js("document.querySelector('.assistant .error').offsetHeight")
    chat.problems.clear()


def test_the_rate_counts_from_the_first_token(chat: Tab, server: Server) -> None:
    server.call(server.llm.hold)
    ask(chat, "0123456789" * 6)
    chat.until("document.querySelector('.growing')")
    chat.js("new Promise((resolve) => setTimeout(resolve, 700))")
    server.call(server.llm.resume)
    chat.until(ANSWERED)
    text = chat.text(".assistant .actions .hint")
    match = re.search(r"first token ([\d.]+) ms · (\d+) tokens · (\d+) per second", text)
    assert match is not None, text
    first, count, rate = map(float, match.groups())
    assert first > 600, text
    assert count == 61
    assert rate > 90, "all of its tokens came after the wait"


def test_the_buttons_under_an_answer_stay_in_their_place(chat: Tab, server: Server) -> None:
    places = """[...document.querySelectorAll('.assistant .actions button')].map((node) => {
        const box = node.getBoundingClientRect();
        const body = document.querySelector('.assistant .body').getBoundingClientRect();
        return [node.textContent, box.x, Math.round(box.y - body.bottom), box.width];
    })"""
    ask(chat, "0123456789 " * 40)
    chat.until_text(BODY, "0123")
    before = chat.js(places)
    chat.until(ANSWERED)
    assert chat.js(places) == before
    assert [place[0] for place in before] == ["Copy", "Prompt", "Why so long?", "Probabilities"]
    left, right = (
        chat.js(f"document.querySelector('.{role} .body').getBoundingClientRect().{side}")
        for role, side in (("assistant", "left"), ("user", "right"))
    )
    box = chat.js("(({left, right}) => [left, right])(messages.getBoundingClientRect())")
    assert left - box[0] < box[1] - right + 60, "answers are at the left"
    assert chat.js("getComputedStyle(document.querySelector('.user')).alignItems") == "flex-end"


def test_the_prompt_is_shown_as_tokens(chat: Tab, server: Server) -> None:
    ask(chat, "a\n<é>")
    chat.until(ANSWERED)
    chat.click("[name=system]")
    chat.type("Written since, and no part of that prompt.")
    chat.click_text(".assistant .actions button", "Prompt")
    assert "6 tokens of at most 4,096" in chat.until_text("#request .readout", "tokens")
    texts = "[...document.querySelectorAll('#request .token')].map((node) => node.textContent)"
    assert chat.js(texts) == ["a", "⏎\n", "<", "\\xc3", "\\xa9", ">"]
    chat.hover("#request .token")
    assert chat.text("#request .readout") == "Token 1: id 97, a"
    chat.js("document.querySelector('.prompt-tokens').focus()")
    chat.press("ArrowRight")
    assert "Token 2: id 10, " in chat.text("#request .readout")
    chat.press("Escape")
    chat.until("!document.getElementById('request').open")


def test_tools_that_are_no_json_are_told_where_they_matter(chat: Tab, server: Server) -> None:
    ask(chat, "hello")
    chat.until(ANSWERED)
    chat.reload()  # what was asked is forgotten
    chat.until("document.querySelector('select[name=model]').value === 'fake'")
    chat.js("document.querySelector('.options details').open = true")
    chat.click("[name=tools]")
    chat.type("{no")
    chat.click_text(".assistant .actions button", "Prompt")
    assert "Tools are not JSON" in chat.until_text("#request .error", "Tools")
    chat.press("Escape")
    ask(chat, "more")
    assert "Tools are not JSON" in chat.until_text(".assistant:last-child .error", "Tools")
    chat.js("document.querySelector('[name=tools]').value = ''")
    chat.click_text(".assistant .error button", "Retry")
    chat.until_text(".assistant:last-child .body", "more")


def test_a_long_prompt_is_shown_in_parts(chat: Tab, server: Server) -> None:
    ask(chat, "x" * 3000)
    chat.until_text(BODY, "xxx")
    chat.click("#stop")
    chat.until(ANSWERED)
    chat.click_text(".assistant .actions button", "Prompt")
    chat.until("document.querySelectorAll('#request .token').length === 2000")
    chat.click_text("#request button", "Show more of the other 1,000")
    assert chat.js("document.querySelectorAll('#request .token').length") == 3000
    assert not chat.js("[...document.querySelectorAll('#request button')].at(-1).offsetHeight")


def test_reasoning_is_folded_and_calls_are_shown(chat: Tab, server: Server) -> None:
    chat.click(".options details summary")
    chat.click("[name=tools]")
    chat.type(json.dumps(TOOLS))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ask(chat, f"<think>Secret thoughts.</think>Here: {call}")
    chat.until(ANSWERED)
    assert "Thought for" in chat.text(".thoughts summary")
    assert not chat.js("document.querySelector('.thoughts').open")
    assert chat.js("document.querySelector('.thoughts p').textContent") == "Secret thoughts."
    assert "add" in chat.text(".call")
    assert '"a": 1' in chat.text(".call")
    # What is sent next is the result of the call.
    assert chat.js("document.getElementById('draft').placeholder") == "The result of add"
    ask(chat, "two")
    chat.until("document.querySelectorAll('.assistant').length === 2")
    chat.until(ANSWERED)
    template = server.llm.chat_template
    assert template is not None
    roles = [message["role"] for message in template.seen[0]]
    assert roles[-3:] == ["user", "assistant", "tool"]


HOSTILE = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
    "\n```html\n<svg onload='window.owned = 1'></svg>\n```\n"
    "`<b>` [link](javascript:window.owned=1) </p></main><iframe src=//example.org>"
)


def test_markup_in_an_answer_is_text(chat: Tab, server: Server) -> None:
    asked = len(chat.requests)
    ask(chat, HOSTILE)
    chat.until(ANSWERED)
    body = chat.js(f"document.querySelector('{BODY}').textContent")
    assert "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>" in body
    assert chat.js("window.owned") is None
    made = "script, img, svg, b, iframe, a[href^=javascript]"
    assert chat.js(f"document.querySelector('#messages').querySelectorAll('{made}').length") == 0
    chat.reload()
    chat.until_text(BODY, "<script>")
    assert chat.js("window.owned") is None
    assert all(url.startswith(server.url) for url in chat.requests)
    assert len(chat.requests) > asked


def test_the_policy_forbids_what_the_page_does_not_do(tab: Tab, server: Server) -> None:
    tab.open(f"{server.url}/")
    with pytest.raises(BrowserError, match="TrustedHTML"):
        tab.js("document.body.innerHTML = '<p>'")
    tab.js("document.head.append(Object.assign(document.createElement('style'), {nonce: ''}))")
    outside = "fetch('http://localhost:1/').then(() => 'sent', () => 'refused')"
    assert tab.js(outside) == "refused"
    tab.until("1")
    assert any("Content Security Policy" in problem for problem in tab.problems)
    tab.problems.clear()


def test_an_error_is_told(chat: Tab, server: Server) -> None:
    chat.click("[name=system]")
    ask(chat, "x" * 5000)
    assert "4096" in chat.until_text(".assistant .error", "tokens")
    chat.until("!document.querySelector('#send').hidden")
    [problem] = chat.problems
    assert "400" in problem, "browsers tell of refused requests themselves"
    chat.problems.clear()


def test_with_the_keyboard_alone(chat: Tab) -> None:
    assert chat.js("document.activeElement.id") == "draft", "one can type at once"
    chat.type("first")
    chat.press("Enter", shift=True)
    chat.type("second")
    chat.press("Enter")
    chat.until(ANSWERED)
    assert chat.text(".message.user .body") == "first\nsecond"
    assert chat.js("document.activeElement.id") == "draft"
    order = []
    for _ in range(6):
        chat.press("Tab")
        order.append(chat.js("document.activeElement.name || document.activeElement.textContent"))
    assert order[:3] == ["New chat", "Regenerate", "Send"]
    assert order[4:] == ["model", "system"]
    # Back to the answer's buttons, and through its tokens.
    for _ in range(7):
        chat.press("Tab", shift=True)
    assert chat.js("document.activeElement.textContent") == "Probabilities"
    chat.press(" ")
    chat.press("ArrowRight")
    assert "f" in chat.until_text("#tip", "%")


def test_a_key_is_asked_for_and_forgotten(tab: Tab) -> None:
    with serving(parrot, ServerConfig(api_key=("secret",))) as guarded:
        tab.open(f"{guarded.url}/")
        tab.until("document.getElementById('key').open")
        assert tab.js("document.activeElement.id") == "key-value"
        tab.type("wrong")
        tab.press("Enter")
        tab.until_text("#key", "did not accept")
        tab.type("secret")
        tab.press("Enter")
        tab.until("document.querySelector('select[name=model]').value === 'fake'")
        ask(tab, "hello")
        tab.until_text(BODY, "hello")
        tab.until(ANSWERED)
        tab.reload()
        tab.until("document.querySelector('select[name=model]').value === 'fake'")
        tab.click("#forget")
        tab.until("document.getElementById('key').open")
        tab.leave()
    assert {"401" in problem for problem in tab.problems} == {True}
    tab.problems.clear()


def test_a_narrow_window(chat: Tab) -> None:
    ask(chat, "word" * 60 + " `" + "code" * 40 + "`\n```\n" + "long " * 40 + "\n```")
    chat.until(ANSWERED)
    chat.resize(360, 640)
    for view in ("chat", "live"):
        chat.js(f"location.hash = '{view}'")
        chat.until(f"!document.getElementById('{view}').hidden")
        assert chat.js("document.documentElement.scrollWidth") <= 360
        assert chat.js("document.body.scrollWidth") <= 360
