"""ApiKeys: who may use the server, and on whose behalf a request is made."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from asyncllm.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web


class ApiKeys:
    """The configured keys; none of them: everybody may.

    The bearers of one key are one tenant. It is named by the key's place, ``"key-1"`` for the
    first, as its name shows in traces and recordings, and must not be the key itself. Tenants get
    equal shares under the ``fair`` policy, and see the traces of their own requests only. Without
    keys all requests are one tenant's, whose name is empty.
    """

    def __init__(self, keys: Sequence[str]):
        self._keys = [key.encode() for key in keys]

    def tenant_of(self, request: web.Request) -> str:
        """
        Raises:
            Unauthorized: keys are configured, and the request bears none of them.
        """
        if not self._keys:
            return ""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # Every key is compared, so that timing says nothing about which one came close.
        matches = [
            hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key)
            for key in self._keys
        ]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("missing or incorrect API key")
        return f"key-{matches.index(True) + 1}"
