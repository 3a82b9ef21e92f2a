"""Take the pictures of the page that docs/page.md shows.

    python -m tools.page_pictures docs/images

It needs a Chromium. The model of the chat recites; the live view shows the simulated device.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLM
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Formats
from tests.support.server.browser import Browser, Tab, find_browser
from tests.support.server.fake_llm import FakeLLM, FakeTemplate
from tests.support.server.serving import Server, serving

ANSWERS = {
    "How do I sort people by age in Python?": """\
Use **`sorted`** for a *new* list, or `list.sort` to sort in place. Both take a `key`:

```python
def by_age(people: list[dict]) -> list[dict]:
    return sorted(people, key=lambda person: person["age"])
```

1. It takes `O(n log n)` steps.
2. It is **stable**:
   - people of the same age keep their order,
   - so you can sort by name first, and then by age.
""",
    "Which of the two is faster?": """\
`list.sort` saves a copy, so it is a little faster:

| Call | Returns | A million items |
|:-----|:--------|----------------:|
| `sorted(items)` | a new list | 92 ms |
| `items.sort()` | `None` | 85 ms |

> Measure with your own data: use [timeit](https://docs.python.org/3/library/timeit.html).
""",
}
EARLIER = ("Name three rivers of Europe", "A haiku about queues", "Why is the sky blue?")


class Reciting(FakeTemplate):
    """The prompt, which the fake model repeats, is the answer."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        question: str = messages[-1]["content"]
        return ANSWERS.get(question, question)


def reciting() -> FakeLLM:
    formats = Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    llm = FakeLLM(formats=formats, step_seconds=0.002)
    llm.chat_template = Reciting()
    return llm


def chat(browser: Browser, folder: Path) -> None:
    with serving(reciting) as server:
        for scheme, name in (("light", "page-chat"), ("dark", "page-phone")):
            tab = browser.tab(1280, 900, scheme)
            tab.open(f"{server.url}/")
            tab.until("document.querySelector('select[name=model]').value")
            for question in EARLIER:
                ask(tab, question)
                tab.click("#new")
            for question in ANSWERS:
                ask(tab, question)
            tab.js("document.activeElement.blur()")
            if scheme == "dark":
                tab.resize(375, 780)
                tab.js("messages.scrollTop = messages.scrollHeight")
            else:
                tab.hover(".assistant:last-child p code .token")
            save(tab, folder / f"{name}.webp")
            tab.close()


def ask(tab: Tab, question: str) -> None:
    count = tab.js("document.querySelectorAll('.assistant').length")
    tab.click("#draft")
    tab.type(question)
    tab.press("Enter")
    tab.until(f"document.querySelectorAll('.assistant').length === {count + 1}")
    tab.until("!document.querySelector('.growing')")


def live(browser: Browser, folder: Path) -> None:
    """50 clients that ask again and again, for 12 slots; and one long prompt."""
    options: dict[str, Any] = {"max_num_seqs": 12, "max_model_len": 8192, "kv_cache_tokens": 20_000}
    with serving(lambda: AsyncLLM(device="sim", sim_profile="h200-8b", **options)) as server:
        end = time.monotonic() + 16
        clients = [threading.Thread(target=load, args=(server, i, end)) for i in range(50)]
        for client in clients:
            client.start()
        tab = browser.tab(1280, 1000)
        tab.open(f"{server.url}/#live")
        tab.js("new Promise((resolve) => setTimeout(resolve, 9000))")
        post(server, 6000, 20)
        tab.js("new Promise((resolve) => setTimeout(resolve, 700))")
        save(tab, folder / "page-live.webp")
        tab.js("document.querySelectorAll('#ended .link')[2].click()")
        tab.until_text("#request .cause", "It")
        save(tab, folder / "page-request.webp")
        tab.press("Escape")
        prompt(tab, server)
        save(tab, folder / "page-prompt.webp")
        tab.leave()
        for client in clients:
            client.join()


def load(server: Server, number: int, end: float) -> None:
    time.sleep(number / 40)
    while time.monotonic() < end:
        post(server, (30, 120, 300)[number % 3], (80, 160, 400)[number % 3], name=f"job-{number}")


def post(server: Server, num_words: int, max_tokens: int, name: str = "") -> None:
    system = "You are a helpful assistant, and answer in a few short sentences. " * 4
    user = f"{name} " + "word " * num_words
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_tokens": max_tokens,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def prompt(tab: Tab, server: Server) -> None:
    tab.click("#to-chat")
    tab.resize(1280, 460)
    tab.click("[name=system]")
    tab.type("Be brief, and name your sources.")
    tab.click("[name=max_tokens]")
    tab.type("30")
    ask(tab, "How many people live in Iceland?")
    tab.click_text(".actions button", "Prompt")
    tab.until_text("#request .readout", "tokens")


def save(tab: Tab, path: Path) -> None:
    tab.js("new Promise((resolve) => setTimeout(resolve, 400))")
    tab.picture(path)
    print(f"{path}: {path.stat().st_size:,} bytes")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = find_browser()
    if path is None:
        sys.exit("there is no Chromium")
    with Browser(path) as browser:
        chat(browser, folder)
        live(browser, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
