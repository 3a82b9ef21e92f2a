"""The page's live view, in a browser: from a slow request to its cause, and its end."""

from __future__ import annotations

import http.client
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
from asyncllm.config.server_config import ServerConfig
from tests.http.process.test_supervise import supervised
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
        tab.until_text("#tiles", "in the last 2 s")
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


def test_its_own_prompt_is_no_other_requests(page: Tab) -> None:
    """A request that was alone; ``others`` are prompt tokens of others in each step."""

    def cause(others: int) -> str:
        steps = [
            {"step": i, "began_ms": 10 + 20 * i, "ms": 19, "rows": 1 + (others > 0)}
            | {"tokens": 40 if i == 0 else 1 + others, "prompt_tokens": 40 if i == 0 else others}
            for i in range(6)
        ]
        events = [("queued", 0, None), ("admitted", 10, 0), ("chunk", 10, 0)]
        trace = {
            "events": [{"kind": kind, "at_ms": at, "step": step} for kind, at, step in events],
            "waited_ms": {},
            "outcome": "stop",
            "first_token_ms": 30,
            "ended_ms": 130,
            "steps_detail": steps,
            "prompt_tokens": 40,
            "cached_tokens": 0,
            "completion_tokens": 6,
        }
        return str(page.js(f"{WAITED}({json.dumps(trace)})")[-1])

    assert cause(0).endswith("Its steps had 1 row and took 19 ms on average.")
    assert "90 % of their tokens were prompts of other requests" in cause(9).replace("\u00a0", " ")


def test_requests_that_wait_for_the_same_are_one_row_that_opens(tab: Tab, small: Server) -> None:
    long = "an-id-of-a-client-0123456789abcdef"
    with asking(small, **{"first": 4000, "second": 2800, long: 50, "fourth": 50, "fifth": 50}):
        tab.open(f"{small.url}/#live")
        tab.until_text("#waiting", "3 requests")
        assert tab.text("#waiting-title") == "Waiting: 3"
        rows = "document.querySelectorAll('#waiting tbody tr').length"
        assert tab.js(rows) == 1
        assert "a free slot: all 2 are taken" in tab.text("#waiting")
        assert re.search(r"(ms|s) to [\d.]+ (ms|s)", tab.text("#waiting"))
        tab.js("document.querySelector('#waiting button').focus()")
        tab.press("Enter")
        tab.until(f"{rows} === 4")
        expanded = "document.querySelector('#waiting button').ariaExpanded"
        assert tab.js(expanded) == "true"
        assert "2 requests before it" in tab.text("#waiting")
        tab.js("new Promise((resolve) => setTimeout(resolve, 1200))")  # it stays open
        assert tab.js(rows) == 4
        assert tab.js("document.activeElement.ariaExpanded") == "true", "and has the focus"
        name = f"document.querySelector('#waiting button[title={long}]')"
        assert tab.js(f"{name}.textContent") == "an-id-of-a…cdef"
        tab.js(f"{name}.click()")
        tab.until_text("#request h2", long)
        tab.press("Escape")
        tab.js("document.querySelector('#waiting button').click()")
        tab.until(f"{rows} === 1")
    small.until_idle()


#: Shows a chart of steps that took these milliseconds, and measures it.
CHART = """(async ({times, target}) => {
    const {StepsChart} = await import('/page/charts.js');
    const [box, legend, readout] = ['div', 'p', 'p'].map((tag) => document.createElement(tag));
    document.body.append(box, legend, readout);
    const steps = times.map((ms, i) => [i, 10 * i, ms, 8, 0, 0, 0]);
    new StepsChart(box, legend, readout).update(
        {steps, itl_target_ms: target, time_ms: 1e6, replicas: [0]});
    setTimeout(() => [box, legend, readout].forEach((node) => node.remove()));
    const line = box.querySelector('.target');
    const bars = [...box.querySelectorAll('.decode')].map((bar) => bar.height.baseVal.value);
    return {
        low: Math.min(...bars), high: Math.max(...bars),
        beyond: box.querySelectorAll('.beyond').length,
        line: Number(line.getAttribute('y1')), shown: line.getAttribute('visibility'),
        text: box.innerText, legend: legend.innerText, label: box.querySelector('svg').ariaLabel,
    };
})"""


@pytest.mark.parametrize(
    ("times", "target", "beyond", "far"),
    [
        ([5.0] * 255 + [2000.0], 8.0, 1, False),
        ([2000.0] + [5.0] * 19, 8.0, 1, False),
        ([5.0] * 200 + [900.0, 2000.0], 27.0, 2, True),
        ([5.0, 5.1, 5.2], 4.0, 0, False),
        ([5.0] * 90 + [30.0] * 10, 27.0, 0, False),
        ([5.0], 0.0, 0, False),
    ],
)
def test_one_long_step_does_not_make_the_scale(
    page: Tab, times: list[float], target: float, beyond: int, far: bool
) -> None:
    made = page.js(f"{CHART}({json.dumps({'times': times, 'target': target})})")
    assert made["beyond"] == beyond
    assert made["low"] > (15 if max(times) == 30 else 50), "of 118"
    assert made["high"] <= 114
    assert made["shown"] == ("visible" if target else "hidden")
    if target:
        assert 0 < made["line"] < 118
        assert f"target {target:.1f}".rstrip("0").rstrip(".")[:9] in made["text"]
        assert ("above" in made["text"]) == far
    assert "p99" in made["legend"]
    assert f"{beyond} beyond the scale" in made["label"]


DRAFTS = """(async (steps) => {
    const {StepsChart} = await import('/page/charts.js');
    const [box, legend, readout] = ['div', 'p', 'p'].map((tag) => document.createElement(tag));
    const chart = new StepsChart(box, legend, readout);
    chart.update({steps, itl_target_ms: 0, time_ms: 20, replicas: [0]});
    const height = (kind) => [...box.querySelectorAll('rect.' + kind)]
        .map((bar) => bar.height.baseVal.value);
    const told = chart.steps.map(({key}) => (chart.tell(key), readout.textContent));
    return {told, legend: legend.textContent, ...Object.fromEntries(
        ['prompt', 'decode', 'accepted', 'rejected'].map((kind) => [kind, height(kind)]))};
})"""


def test_drafted_tokens_have_their_part_of_a_bar(page: Tab) -> None:
    """Of ten tokens two are of decode rows, five were drafted and right, and three wrong."""
    steps = [[7, 0, 5, 2, 0, 0, 0, 8, 5], [8, 6, 5, 2, 0, 0, 0], [9, 12, None, 1, 0, 0, 0, 4, 0]]
    made = page.js(f"{DRAFTS}({json.dumps(steps)})")
    [accepted], [rejected] = made["accepted"], made["rejected"]
    first, whole = made["decode"]
    parts = [part / whole for part in (first, accepted, rejected)]
    assert parts == pytest.approx([0.2, 0.5, 0.3], abs=0.01)
    assert made["prompt"] == []
    assert [("draft" in text) for text in made["told"]] == [True, False, True]
    assert "8 drafted tokens (5 right)" in made["told"][0]
    assert "4 drafted tokens," in made["told"][2]
    assert "of 8 drafted tokens right" in made["legend"]


WAITED = """(async (trace) => {
    const {waits, cause} = await import('/page/request.js');
    return [...waits(trace), cause(trace)];
})"""


@pytest.mark.parametrize(
    ("events", "waited", "ended", "whole"),
    [
        ([("queued", 0), ("admitted", 900)], {"slots": 700, "pages": 150, "budget": 0}, 1000, 900),
        ([("queued", 0), ("admitted", 900)], {"slots": 900}, 1000, 900),
        ([("queued", 0), ("admitted", 5)], {}, 6, 5),
        ([("queued", 0)], {"pages": 400}, 500, 500),
        (
            [("queued", 0), ("admitted", 300), ("preempted", 400), ("admitted", 900)],
            {"slots": 250, "pages": 500},
            950,
            800,
        ),
        ([("queued", 0), ("shares", 100), ("admitted", 700)], {"slots": 80}, 720, 700),
    ],
)
def test_times_in_the_queue_add_up(
    page: Tab, events: list[tuple[str, float]], waited: dict[str, float], ended: float, whole: float
) -> None:
    trace = {
        "events": [{"kind": kind, "at_ms": at} for kind, at in events],
        "waited_ms": waited,
        "outcome": "stop",
        "first_token_ms": None,
        "ended_ms": ended,
        "steps_detail": [],
        "prompt_tokens": 10,
        "cached_tokens": 0,
    }
    total, each, cause = page.js(f"{WAITED}({json.dumps(trace)})")
    assert total == whole
    assert sum(ms for _, ms in each) == pytest.approx(whole)
    assert {reason: ms for reason, ms in each if reason} == {k: v for k, v in waited.items() if v}
    assert cause.startswith("It ")


def test_a_message_tells_why_it_took_long(tab: Tab, small: Server) -> None:
    tab.open(f"{small.url}/")
    tab.until("document.querySelector('select[name=model]').value")
    tab.click("[name=max_tokens]")
    tab.type("30")
    tab.click("#draft")
    tab.type("Hello")
    tab.press("Enter")
    tab.until("document.querySelector('.assistant .stats')?.innerText.includes('tokens')")
    tab.click_text(".assistant .actions button", "Why so long?")
    cause = tab.until_text("#request .cause", "took")
    # The page's temperature is above 0, so an answer may end before its limit.
    assert re.search(r"\b([12]?\d|30) tokens", cause) or "prompt" in cause
    assert "admitted to slot" in tab.text("#request")


def test_each_click_is_about_the_request_that_was_clicked_of_all_replicas(tab: Tab) -> None:
    with supervised(replicas=2, step_seconds=0.02) as running:
        running.until_ready()
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        streams = {}
        for i in range(4):
            streams[f"mine-{i}"] = connection = http.client.HTTPConnection(
                "127.0.0.1", running.port, timeout=40
            )
            headers = {"X-Request-Id": f"mine-{i}"}
            connection.request("POST", "/generate", json.dumps(body), headers)
        answers = {name: connection.getresponse() for name, connection in streams.items()}
        tab.open(f"http://127.0.0.1:{running.port}/#live")
        for i in range(4):
            tab.until_text("#running", f"mine-{i}, replica {i % 2}")
        for i in (2, 1, 3, 0):
            name = f"mine-{i}"
            tab.js(
                "[...document.querySelectorAll('#running .link')]"
                f".find(node => node.innerText.startsWith('{name}')).click()"
            )
            tab.until_text("#request h2", name)
            tab.click("#request .danger")
            tab.until_text("#request .danger", "Cancelled")
            assert b'"finish_reason":"abort"' in answers[name].read()
            tab.press("Escape")
            tab.until_text("#ended", name)
        for connection in streams.values():
            connection.close()
        running.process.terminate()
        assert running.end() == 0
