"""Certificates. Imported only where TLS is configured: the ssl module takes 5 MB."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncllm.errors import BadRequest
from asyncllm.supervise.poller import READ, WRITE

log = logging.getLogger(__name__)

#: A certificate that ends within this time is warned of.
WARN_SECONDS: Final = 14 * 86400.0

#: What calls on a socket that does not block are waiting for, by their error.
WAITS: Final[Mapping[type[OSError], int]] = {
    ssl.SSLWantReadError: READ,
    ssl.SSLWantWriteError: WRITE,
}

_EXPIRED: Final = {9: "is not valid yet", 10: "has expired"}


class Tls:
    """Attributes:
    context: for new connections; replaced when the files are read again.
    """

    def __init__(self, context: ssl.SSLContext):
        self.context = context


def load_context(cert: str, key: str) -> ssl.SSLContext:
    """A server's context; warns in the log of a certificate that has expired, or soon will.

    Args:
        cert: PEM file with the certificate, and those that it is signed with.
        key: PEM file with its private key.

    Raises:
        BadRequest: a file cannot be read, or is not what it should be.
    """
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise BadRequest(f"{name}: cannot read {path}: {error.strerror}", param=name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except BadRequest:
        raise
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{key} is not the key of the certificate {cert}"
        else:
            problem = f"{cert} and {key} must hold a certificate and its key, in PEM"
        raise BadRequest(f"tls_key: {problem}", param="tls_key") from None
    if (outdated := _validity(context, cert)) is not None:
        log.warning("the TLS certificate %s %s", cert, outdated)
    return context


def _no_password() -> bytes:
    raise BadRequest("tls_key: the key is encrypted; use one without a password", param="tls_key")


def _validity(context: ssl.SSLContext, cert: str) -> str | None:
    """What is wrong with the certificate's dates, as a client sees them in a handshake."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it may be signed by anybody
    try:
        client.load_verify_locations(cert)
        ends = _handshake(context, client)
    except ssl.SSLCertVerificationError as error:
        return _EXPIRED.get(error.verify_code)
    except (OSError, KeyError):  # something unusual, which clients will judge
        return None
    left = ends - time.time()
    return None if left > WARN_SECONDS else f"expires in {left / 86400:.0f} days"


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> float:
    """Let the two shake hands in memory; returns when the certificate ends."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client_side, server_side]
    for side in waiting * 4:  # TLS 1.3 takes two turns of each
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client_side.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(found["notAfter"]))
