"""The page's live view, in a browser: from a slow request to its cause, and its end."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from asyncllm import AsyncLLM
from asyncllm.server_config import ServerConfig
from tests.support.server.browser import Tab
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving


@pytest.fixture  # a new one each: clients that have left tell it that others may leave
def small() -> Iterator[Server]:
    """The simulated device, with two slots and 512 pages; a step takes some milliseconds."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 8192, "kv_cache_tokens": 8192}
    with serving(lambda: AsyncLLM(device="sim", sim_profile="h200-8b", **options)) as running:
        yield running
        running.until_idle()


def ask(server: Server, name: str, max_tokens: int) -> str:
    """How the answer ends."""
    body = {"prompt": f"{name}: a private story", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        reason: str = json.load(answer)["choices"][0]["finish_reason"]
        return reason


@contextmanager
def asking(server: Server, **lengths: int) -> Iterator[dict[str, Future[str]]]:
    """Requests by name, begun one after the other; what still runs is cancelled in the end."""
    answers: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(len(lengths)) as pool:
        for name, length in lengths.items():
            answers[name] = pool.submit(ask, server, name, length)
            server.until(partial(_holds, server, len(answers)), 10)
        try:
            yield answers
        finally:
            for name in lengths:
                server.post(f"/v1/requests/{name}/abort", b"")


def _holds(server: Server, count: int) -> bool:
    return server.llm.stats.running + server.llm.stats.waiting == count


def test_two_clicks_to_the_cause_and_one_to_the_end(tab: Tab, small: Server) -> None:
    with asking(small, first=4000, second=2800, third=5600) as answers:
        tab.open(f"{small.url}/")
        tab.click("#to-live")
        tab.until_text("#waiting", "third")
        tab.until_text("#waiting", "a free slot: all 2 are taken")
        assert "private" not in tab.text()
        tab.click("#waiting .link")
        assert "It waits for a free slot" in tab.until_text("#request .cause", "waits")
        assert tab.text("#request h2") == "third"
        tab.press("Escape")
        tab.until("!document.getElementById('request').open")
        assert tab.js("document.activeElement.textContent") == "third", "the focus is back"

        # With a slot free, there are too few pages for it.
        tab.js("[...document.querySelectorAll('#running .link')][1].click()")
        tab.until_text("#request h2", "second")
        tab.click("#request .danger")
        tab.until_text("#request .danger", "Cancelled")
        assert answers["second"].result(10) == "abort"
        tab.press("Escape")
        tab.until_text("#ended", "second")
        assert "abort" in tab.text("#ended")
        # One that left before its limit makes the same of others a little more likely.
        tab.until_text("#waiting", "KV pages: it may need 3")
    small.until_idle()
    tab.until_text("#waiting", "Nothing waits.")
    # What it waited for is also told when it has ended.
    tab.js(
        "[...document.querySelectorAll('#ended .link')].find(n => n.innerText === 'third').click()"
    )
    cause = tab.until_text("#request .cause", "in the queue")
    assert "a free slot" in cause or "KV pages" in cause


def test_other_keys_requests_and_the_admin_key(tab: Tab) -> None:
    config = ServerConfig(api_key=("secret-a", "secret-b"), admin_key="boss")
    with serving(partial(FakeLLM, max_running=1), config, prefix="/llm") as server:
        server.call(server.llm.hold)
        body = {"prompt": "private", "max_tokens": 5}
        extra = "Authorization: Bearer secret-b\r\nX-Request-Id: theirs\r\n"
        client = server.open("/v1/completions", body, extra=extra)
        server.until(partial(_holds, server, 1))
        tab.open(f"{server.url}/#live")  # the server is mounted below another one
        tab.until("document.getElementById('key').open")
        tab.type("secret-a")
        tab.press("Enter")
        tab.until_text("#waiting", "another key")
        assert "theirs" not in tab.text()
        assert tab.js("document.querySelectorAll('#waiting .link').length") == 0
        tab.click("#admin")
        tab.type("boss")
        tab.press("Enter")
        tab.until_text("#waiting", "theirs")
        tab.click("#waiting .link")
        tab.click("#request .danger")
        tab.until_text("#ended", "theirs")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
        server.call(server.llm.resume)
        tab.leave()
    assert {"401" in problem for problem in tab.problems} == {True}
    tab.problems.clear()


def test_figures_and_charts(tab: Tab, small: Server) -> None:
    with asking(small, one=6000, two=1200):
        tab.open(f"{small.url}/#live")
        tab.until_text("#tiles", "steps/s")
        tab.until("Number(document.querySelector('#tiles strong').textContent) > 0")
        tab.until_text("#running", "answers")
        tab.until("document.querySelectorAll('.steps .decode').length > 20")
        tab.js("document.querySelector('.steps').focus()")
        tab.press("ArrowLeft")
        first = tab.until_text("#step-text", "decode row")
        tab.press("ArrowLeft")
        tab.until(f"document.getElementById('step-text').innerText !== {json.dumps(first)}")
        label = tab.js("document.querySelector('.cells').getAttribute('aria-label')")
        assert "running, by request" in label
        assert tab.js("document.querySelectorAll('.cell.owner').length") > 2
        tab.click("#pause")
        assert tab.text("#pause") == "Go on"
    small.until_idle()


def test_a_message_tells_why_it_took_long(tab: Tab, small: Server) -> None:
    tab.open(f"{small.url}/")
    tab.until("document.querySelector('select[name=model]').value")
    tab.click("[name=max_tokens]")
    tab.type("30")
    tab.click("#draft")
    tab.type("Hello")
    tab.press("Enter")
    tab.until("document.querySelector('.assistant .actions:not([hidden])')")
    tab.click_text(".assistant .actions button", "Why so long?")
    cause = tab.until_text("#request .cause", "took")
    # The page's temperature is above 0, so an answer may end before its limit.
    assert re.search(r"\b([12]?\d|30) tokens", cause) or "prompt" in cause
    assert "admitted to slot" in tab.text("#request")
