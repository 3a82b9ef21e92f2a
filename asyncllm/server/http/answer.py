"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What all of them share: no field that is not written down here."""


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )
