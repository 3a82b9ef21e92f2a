"""ApiKeys: who may use the server, and whose request it is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest, Unauthorized
from asyncllm.server.limits.accounts import Rates

_TENANT: Final = web.RequestKey("asyncllm_tenant", str)


def has_key(request: web.Request, wanted: str) -> bool:
    """Whether the request has this one key."""
    given = bearer(request).encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, wanted.encode())


def tenant_of(request: web.Request) -> str:
    """The name of the request's tenant; empty when the server has no keys, or none was needed."""
    tenant: str = request.get(_TENANT, "")
    return tenant


class Key(NamedTuple):
    """An API key, and what its bearers may use in a minute."""

    text: str
    rates: Rates


def configured_keys(config: ServerConfig) -> tuple[Key, ...]:
    """The keys of the command line, then those of the key file, one in each line that has text.

    Raises:
        OSError: the file cannot be read.
        BadRequest: the file has no key, which would leave the server open; or a line is malformed.
    """
    common = Rates(config.requests_per_minute, config.tokens_per_minute)
    keys = [Key(text, common) for text in config.api_key]
    if config.api_key_file is None:
        return tuple(keys)
    lines = Path(config.api_key_file).read_text("utf-8").splitlines()
    listed = [
        _parse_key(words, common, f"line {number} of {config.api_key_file}")
        for number, line in enumerate(lines, 1)
        if (words := line.split())
    ]
    if not listed:
        raise BadRequest(f"{config.api_key_file} has no API key in it", param="api_key_file")
    return (*keys, *listed)


def _parse_key(words: list[str], common: Rates, place: str) -> Key:
    """From ``KEY [requests-per-minute=N] [tokens-per-minute=N]``; N may be "unlimited"."""
    rates = {"requests-per-minute": common.requests, "tokens-per-minute": common.tokens}
    for word in words[1:]:
        name, _, value = word.partition("=")
        is_number = value.isascii() and value.isdigit() and int(value) > 0
        if name not in rates or not (is_number or value == "unlimited"):
            raise BadRequest(
                f"{place}: after the key come {' and '.join(f'{known}=N' for known in rates)}, "
                f"with a positive number or unlimited; keys have no spaces",
                param="api_key_file",
            )
        rates[name] = int(value) if is_number else None
    return Key(words[0], Rates(*rates.values()))


class ApiKeys:
    """The configured keys; without any, everybody may use the server.

    All clients with the same key are one tenant. Its name shows in traces and recordings, so it is
    not the key but its place, ``"key-1"`` for the first. Tenants get equal shares under the
    ``fair`` policy, and see only their own requests. Without keys there is one tenant, whose name
    is empty.

    Attributes:
        tenants: their names, in the order of the keys.
    """

    def __init__(self, keys: Sequence[str]):
        self._names: dict[bytes, str] = {}  # also of keys that were removed
        self._given = 0
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Admit these keys from now on. A key keeps its name, which no other key ever gets."""
        self._digests = [_digest(key.encode()) for key in keys]
        for digest in self._digests:
            if digest not in self._names:
                self._given += 1
                self._names[digest] = f"key-{self._given}"
        self.tenants = [self._names[digest] for digest in self._digests]

    def differ(self, keys: Sequence[str]) -> bool:
        """Whether ``replace`` would change anything."""
        return [_digest(key.encode()) for key in keys] != self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, request: web.Request) -> None:
        """Find out whose request it is, for ``tenant_of``.

        Raises:
            Unauthorized: it has none of the keys.
        """
        given = _digest(bearer(request).encode("utf-8", "surrogateescape"))
        # Every key is compared, and as a digest: the time this takes says nothing about any key,
        # not even its length.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise Unauthorized("missing or incorrect API key")
        request[_TENANT] = self.tenants[matches.index(True)]


def bearer(request: web.Request) -> str:
    """The request's key as OpenAI's or Anthropic's clients send it; empty without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return request.headers.get("x-api-key", "").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
