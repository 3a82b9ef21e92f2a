from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.server.browser import Browser, Tab, find_browser
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium (make test installs it, as root on Debian)")
    with Browser(path) as running:
        yield running


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Tab]:
    """The page of a server of its own, for tests that only try parts of it, one after the other.

    Nothing may go wrong on it, and nothing is asked of anybody else.
    """
    with serving() as server:
        opened = browser.tab()
        opened.open(f"{server.url}/")
        yield opened
        opened.call("Runtime.evaluate", expression="1")
        opened.leave()
        assert opened.problems == []
        asked = [url for url in opened.requests if not url.startswith((server.url, "about:"))]
        opened.close()
        assert asked == []


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new tab; nothing may go wrong on its page that the test does not expect."""
    opened = browser.tab()
    yield opened
    opened.call("Runtime.evaluate", expression="1")  # events on their way arrive before its answer
    opened.close()
    assert opened.problems == []
