"""The page for browsers: a few static files, which are read once."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import hdrs, web

from asyncllm.errors import NotFound

FOLDER: Final = Path(__file__).with_name("static")
CONTENT_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
#: The page loads nothing from elsewhere, runs no inline script, and cannot be put into a frame.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept, Accept-Encoding",
}


class File(NamedTuple):
    """One file, as it is and compressed."""

    content_type: str
    plain: bytes
    compressed: bytes


class Page:
    """The files by name."""

    def __init__(self, folder: Path = FOLDER):
        self._files = {
            path.name: File(kind, path.read_bytes(), gzip.compress(path.read_bytes(), mtime=0))
            for path in folder.iterdir()
            if (kind := CONTENT_TYPES.get(path.suffix)) is not None
        }

    def index(self, request: web.Request) -> web.Response:
        """The page itself; the same address has other answers for other clients."""
        return self._response(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        """What the page loads.

        Raises:
            NotFound: there is no such file.
        """
        name = request.match_info["name"]
        if name not in self._files:
            raise NotFound(f"the page has no file {name!r}")
        return self._response(request, name)

    def _response(self, request: web.Request, name: str) -> web.Response:
        file = self._files[name]
        compress = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
        response = web.Response(
            body=file.compressed if compress else file.plain,
            content_type=file.content_type,
            charset="utf-8",
            headers=HEADERS,
        )
        if compress:
            response.headers[hdrs.CONTENT_ENCODING] = "gzip"
        return response


PAGE: Final = web.AppKey("asyncllm_page", Page)


def wants_page(request: web.Request) -> bool:
    """Whether a browser asks; other clients accept anything, or JSON."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")
