"""The page's conversations: kept, renamed, deleted, exported; also without storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.http.page.test_chat import ANSWERED, BODY, ask, parrot
from tests.support.server.browser import Tab
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server

READY = "document.querySelector('select[name=model]').value === 'fake'"
TITLES = (
    "[...document.querySelectorAll('#chat-list .item span:first-child')].map((n) => n.textContent)"
)
#: Storage that refuses, from the beginning of the page on.
REFUSES = """
for (const name of ['localStorage', 'sessionStorage'])
    Object.defineProperty(window, name, {get() { throw new DOMException('no', 'SecurityError'); }});
"""
FULL = "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };"


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    return parrot


@pytest.fixture
def chat(tab: Tab, server: Server) -> Tab:
    tab.open(f"{server.url}/")
    tab.until(READY)
    return tab


def say(tab: Tab, text: str) -> None:
    count = tab.js("document.querySelectorAll('.assistant').length")
    ask(tab, text)
    tab.until(f"document.querySelectorAll('.assistant').length === {count + 1}")
    tab.until(ANSWERED)


def titles(tab: Tab) -> list[str]:
    found: list[str] = tab.js(TITLES)
    return found


def test_conversations_are_kept_and_opened_again(chat: Tab, server: Server) -> None:
    say(chat, "First  question\nwith a second line")
    say(chat, "More of it")
    chat.click("#new")
    say(chat, "Another question")
    assert titles(chat) == ["Another question", "First question with a second line"]
    chat.click_text("#chat-list .item span:first-child", "First question with a second line")
    assert chat.js("document.querySelectorAll('.message').length") == 4
    assert chat.text("#chat-list [aria-current]").startswith("First question")
    assert chat.js("document.activeElement.id") == "draft"
    chat.reload()  # the tab still shows it
    assert chat.js("document.querySelectorAll('.message').length") == 4
    chat.js("sessionStorage.clear()")  # as in another tab
    chat.open("about:blank")
    chat.open(f"{server.url}/")
    chat.until(READY)
    assert "Ask away" in chat.text("#messages")
    assert len(titles(chat)) == 2
    chat.click_text("#chat-list .item span:first-child", "Another question")
    say(chat, "Go on")  # with what was said before
    template = server.llm.chat_template
    assert template is not None
    assert [message["content"] for message in template.seen[0]] == [
        "Another question",
        "Another question",
        "Go on",
    ]


def test_renaming_and_deleting(chat: Tab) -> None:
    say(chat, "One")
    chat.click("#new")
    say(chat, "Two")
    for typed, key, title in (("Better", "Enter", "Better"), ("Worse", "Escape", "Better")):
        chat.click("#rename")
        assert chat.js("document.activeElement.ariaLabel") == "Title"
        chat.type(typed)
        chat.press(key)
        assert titles(chat) == [title, "One"]
        assert chat.js("document.activeElement.id") == "rename"
    chat.reload()
    assert titles(chat) == ["Better", "One"]
    chat.click("#delete")
    assert chat.text("#delete") == "Really delete?"
    assert titles(chat) == ["Better", "One"]
    chat.click("#draft")
    assert chat.text("#delete") == "Delete", "it was not meant"
    for _ in range(2):
        chat.click("#delete")
    assert titles(chat) == ["One"]
    assert "Ask away" in chat.text("#messages")
    assert chat.js("document.getElementById('delete').disabled")
    say(chat, "Three")
    for _ in range(2):
        chat.click("#delete-all")
    assert titles(chat) == []
    chat.reload()
    assert titles(chat) == []
    assert chat.js("Object.keys(localStorage).length") == 0


def test_deleting_ends_the_answer_under_way(chat: Tab, server: Server) -> None:
    aborted = len(server.llm.aborted)
    ask(chat, "0123456789 " * 300)
    chat.until_text(BODY, "0123")
    for _ in range(2):
        chat.click("#delete")
    server.until(lambda: len(server.llm.aborted) > aborted)
    server.until_idle()
    say(chat, "Next")
    assert titles(chat) == ["Next"]


def test_another_conversation_ends_the_answer_and_keeps_it(chat: Tab, server: Server) -> None:
    ask(chat, "0123456789 " * 300)
    chat.until_text(BODY, "0123")
    chat.click("#new")
    server.until_idle()
    assert "Ask away" in chat.text("#messages")
    assert chat.js("document.getElementById('stop').hidden")
    say(chat, "Next")
    chat.click_text("#chat-list .item span:first-child", titles(chat)[1])
    assert "0123" in chat.text(BODY)


def test_exporting(chat: Tab) -> None:
    chat.click("[name=system]")
    chat.type("Be brief.")
    say(chat, "What is it?")
    chat.js(
        """window.made = [];
        URL.createObjectURL = (blob) => (blob.text().then((text) => made.push(text)), 'blob:x');
        HTMLAnchorElement.prototype.click = function () { made.push(this.download); };"""
    )
    chat.click("#export")
    chat.until("made.length === 2")
    texts: list[str] = chat.js("made")
    assert "What is it?.json" in texts
    body = json.loads(next(text for text in texts if text.startswith("{")))
    assert body["title"] == "What is it?"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "What is it?"},
    ]


def module(tab: Tab, script: str) -> Any:
    """What a script makes of the module that keeps conversations."""
    return tab.js(f"(async () => {{ const m = await import('/page/chats.js'); {script} }})()")


def test_what_is_kept_has_an_end(chat: Tab) -> None:
    made = """
    const keep = (id, size) => m.keepChat({id: `chat${id}`, title: `${id}`, at: id,
        messages: [{role: 'user', content: 'x'.repeat(size), tokens: [{top: 'no'.repeat(1000)}]}]});
    const kept = () => m.keptChats().map(({title}) => Number(title));
    const size = () => Object.values(localStorage).join('').length;
    """
    script = "for (let i = 1; i <= 130; i++) keep(i, 10); return [kept(), size()];"
    kept, size = module(chat, made + script)
    assert kept == list(range(130, 30, -1))
    assert size < 20_000, "probabilities are not kept"
    script = "for (let i = 200; i < 210; i++) keep(i, 500_000); return [kept(), size()];"
    kept, size = module(chat, made + script)
    assert kept == [209, 208, 207]
    assert size < 2_000_000
    kept_longest, kept = module(chat, made + "return [keep(300, 2_100_000), kept()];")
    assert not kept_longest
    assert kept == [300, 209, 208, 207], "until the page is closed"
    chat.reload()
    assert module(chat, made + "return kept();") == [209, 208, 207]


def test_what_others_wrote_is_left_alone(chat: Tab, server: Server) -> None:
    say(chat, "Mine")
    chat.js(
        """const key = Object.keys(localStorage)[0];
        const prefix = key.slice(0, key.lastIndexOf(' ') + 1);
        localStorage.other = 'their value';
        const values = ['', 'x', '{}', '{"title": 1, "at": "x"}\\n{', 'null\\n[]',
            '{"at": 5}\\n[null]',
            '{"title": "<b>t</b>", "at": 3}\\n[{"role": "user"}, {"content": 5}]',
            '{"title": "t", "at": 4}\\n[{"role": "assistant", "content": "x"}]'];
        values.forEach((value, i) => localStorage.setItem(prefix + i, value));"""
    )
    chat.reload()
    chat.until(READY)
    for i in range(len(titles(chat))):
        chat.js(f"document.querySelectorAll('#chat-list .item')[{i}].click()")
    assert "Mine" in titles(chat)
    assert chat.js("document.querySelectorAll('#chat-list b').length") == 0
    assert chat.js("localStorage.other") == "their value"


@pytest.mark.parametrize("script", [REFUSES, FULL], ids=["refuses", "full"])
def test_without_storage_all_works_until_the_page_is_closed(
    tab: Tab, server: Server, script: str
) -> None:
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    tab.open(f"{server.url}/")
    tab.until(READY)
    say(tab, "First")
    assert "gone when the page is closed" in tab.text("#chats-text")
    tab.click("#new")
    say(tab, "Second")
    assert titles(tab) == ["Second", "First"]
    tab.click_text("#chat-list .item span:first-child", "First")
    assert tab.text(BODY) == "First"
    tab.click("#rename")
    tab.type("Renamed")
    tab.press("Enter")
    assert sorted(titles(tab)) == ["Renamed", "Second"]
    for _ in range(2):
        tab.click("#delete")
    assert titles(tab) == ["Second"]
