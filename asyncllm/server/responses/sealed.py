"""Texts that a client keeps for the server, as ``encrypted_content``."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

#: Begins what this server has written; what another one has encrypted cannot be read.
_OURS: Final = "asyncllm1."


def seal(text: str) -> str:
    """The text in a form that nobody takes for something to read. It is not encrypted."""
    return _OURS + b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: object) -> str | None:
    """The text; None if another server has sealed it."""
    if not isinstance(sealed, str) or not sealed.startswith(_OURS):
        return None
    try:
        return b64decode(sealed[len(_OURS) :], validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
