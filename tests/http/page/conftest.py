from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.server.browser import Browser, Tab, find_browser

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium (make test installs it, as root on Debian)")
    with Browser(path) as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new tab; nothing may go wrong on its page that the test does not expect."""
    opened = browser.tab()
    yield opened
    opened.call("Runtime.evaluate", expression="1")  # events on their way arrive before its answer
    opened.close()
    assert opened.problems == []
