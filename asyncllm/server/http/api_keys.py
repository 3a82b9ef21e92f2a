"""ApiKeys: who may use the server, and whose request it is."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from asyncllm.errors import BadRequest, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server_config import ServerConfig

_TENANT: Final = web.RequestKey("asyncllm_tenant", str)


def tenant_of(request: web.Request) -> str:
    """The name of the request's tenant; empty when the server has no keys, or none was needed."""
    tenant: str = request.get(_TENANT, "")
    return tenant


def configured_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of the command line, then those of the key file, one in each line that has text.

    Raises:
        OSError: the file cannot be read.
        BadRequest: the file has no key, which would leave the server open.
    """
    if config.api_key_file is None:
        return config.api_key
    lines = Path(config.api_key_file).read_text("utf-8").splitlines()
    keys = [stripped for line in lines if (stripped := line.strip())]
    if not keys:
        raise BadRequest(f"{config.api_key_file} has no API key in it", param="api_key_file")
    return (*config.api_key, *keys)


class ApiKeys:
    """The configured keys; without any, everybody may use the server.

    All clients with the same key are one tenant. Its name shows in traces and recordings, so it is
    not the key but its place, ``"key-1"`` for the first. Tenants get equal shares under the
    ``fair`` policy, and see only their own requests. Without keys there is one tenant, whose name
    is empty.
    """

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, request: web.Request) -> None:
        """Find out whose request it is, for ``tenant_of``.

        Raises:
            Unauthorized: it has none of the keys.
        """
        given = _digest(_bearer(request).encode("utf-8", "surrogateescape"))
        # Every key is compared, and as a digest: the time this takes says nothing about any key,
        # not even its length.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise Unauthorized("missing or incorrect API key")
        request[_TENANT] = f"key-{matches.index(True) + 1}"


def _bearer(request: web.Request) -> str:
    """The key as OpenAI's or Anthropic's clients send it; empty without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return request.headers.get("x-api-key", "").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
