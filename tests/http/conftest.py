from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.http.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A fake server that the tests of one module share; it must end idle."""
    with serving() as running:
        yield running
        running.until_idle()


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """Its /openapi.json."""
    found: dict[str, Any] = server.get("/openapi.json").json
    return found
