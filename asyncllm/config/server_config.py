"""ServerConfig: the HTTP side of ``asyncllm serve``, described as ``EngineConfig`` is."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from asyncllm.config.option_fields import Bytes, Count, Seconds, doc
from asyncllm.errors import BadRequest
from asyncllm.types import Pooling
from asyncllm.types.validate import Form, Range, check_fields, not_empty

MetricsCompat = Literal["vllm"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

#: Scheme, host and port, as browsers write them in an Origin header.
#: As browsers send it: another writing would never be found.
_ORIGIN: Final = Form(
    r"\*|(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://[^/\s\\@?#A-Z\x80-\U0010ffff]+",
    "like https://example.org (lower case, ASCII, no default port) or *",
)
#: A name, or what all names below it end with.
_HOST_NAME: Final = Form(
    r"\*|(?:\*?\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?",
    "like llm.example.org, .example.org or *",
)
_HTTP_URL: Final = Form(r"https?://[^/\s?#]+(?:/\S*)?", "like http://localhost:4318")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side of ``asyncllm serve``.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    host: Annotated[str, doc("address to listen on; 0.0.0.0 is reachable from other machines")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Range(0, 65_535), doc("port to listen on; 0 picks a free one")] = 8000
    tls_cert: Annotated[
        str | None,
        doc(
            "serve HTTPS with the certificate in this PEM file, which also has those that sign it",
            metavar="FILE",
        ),
    ] = None
    tls_key: Annotated[
        str | None, doc("PEM file with the certificate's private key", metavar="FILE")
    ] = None
    supervise: Annotated[
        bool, doc("run under a small parent process that starts the server again when it dies")
    ] = True
    standby: Annotated[
        bool | None,
        doc(
            "keep a second process that has imported everything and becomes the server when this "
            "one dies: the restart takes some seconds less, and needs some of the host's memory; "
            "on by default on a GPU"
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        not_empty,
        doc("name of the model for clients; may be repeated; the model's own by default"),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        not_empty,
        doc("key that clients must send; may be repeated; by default no key is needed"),
    ] = ()
    api_key_file: Annotated[
        str | None,
        doc(
            "file with more API keys, one per line; a key may be followed by limits of its own, "
            "such as tokens-per-minute=9000 requests-per-minute=60",
            metavar="FILE",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        not_empty,
        doc(
            "key for POST /admin/reload, and for the page's live view of the requests of all "
            "keys; without it the route does not exist; API keys do not work for these"
        ),
    ] = None
    isolate_keys: Annotated[
        bool,
        doc(
            "share cached prefixes only between requests with the same API key; otherwise the "
            "clients of one key can tell from cached_tokens and response times whether those of "
            "another key sent a prompt"
        ),
    ] = False
    cors_origin: Annotated[
        tuple[str, ...],
        _ORIGIN,
        doc("web origin that may call the server, such as https://example.org; * for all"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        _HOST_NAME,
        doc(
            "host name by which clients may reach a server without keys, besides local names and "
            "addresses; .example.org for all names below it, * for any; may be repeated",
            metavar="NAME",
        ),
    ] = ()
    page: Annotated[
        bool,
        doc("show browsers a page at / to chat with the model and to see what the server does"),
    ] = True
    strict: Annotated[
        bool, doc("refuse requests with unknown fields, instead of ignoring the fields")
    ] = False
    pooling: Annotated[
        Pooling | None,
        doc(
            "hidden state that embeddings are made of, if the request does not say it: the last "
            "token's or the mean of all; by default what the model's 1_Pooling says, or else the "
            "last token's"
        ),
    ] = None
    metrics_keyless: Annotated[
        bool, doc("let /metrics be read without an API key, for gateways and Prometheus")
    ] = False
    metrics_compat: Annotated[
        MetricsCompat | None,
        doc("also give metrics under the names of another server, which gateways know"),
    ] = None
    log_level: Annotated[
        LogLevel, doc("the least severe messages that are logged on stderr", "logging")
    ] = "info"
    log_format: Annotated[
        LogFormat, doc("lines for people, or one JSON object for each record", "logging")
    ] = "text"
    log_requests: Annotated[
        bool,
        doc(
            "log a line for each request, with its route, tenant, tokens and times, but never its "
            "text",
            "logging",
        ),
    ] = False
    requests_per_minute: Annotated[
        Count | None,
        doc(
            "requests that each API key may send per minute, or without keys all clients together",
            "limits",
        ),
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Range(1, 2**53)] | None,
        doc(
            "tokens of prompts and answers that each API key may use per minute, or without keys "
            "all clients together",
            "limits",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        _HTTP_URL,
        doc(
            "where to send a span for each request, such as http://localhost:4318; "
            "needs the extra otel",
            "logging",
            metavar="URL",
        ),
    ] = None
    max_body_bytes: Annotated[Bytes, doc("largest accepted request body, in bytes", "limits")] = (
        8 * 1024 * 1024
    )
    max_bodies_bytes: Annotated[
        Bytes,
        doc(
            "most bytes of request bodies that are being read at once, over all connections; "
            "other bodies wait, and get 503 if that takes long",
            "limits",
        ),
    ] = 256 * 1024 * 1024
    max_unsent_bytes: Annotated[
        Bytes,
        doc(
            "most bytes of answers kept for clients that read slowly, over all connections; with "
            "more, the slowest clients are cut off",
            "limits",
        ),
    ] = 64 * 1024 * 1024
    request_seconds: Annotated[
        float,
        Range(0, 30 * 86_400, is_open=True),
        doc("how long a request may take to arrive, and a connection may be idle", "limits"),
    ] = 75.0
    drain_seconds: Annotated[
        Seconds, doc("how long running requests may take to finish after SIGTERM", "limits")
    ] = 30.0

    stall_seconds: Annotated[
        Seconds | None,
        doc(
            "end the process when a step or the event loop makes no progress for this many "
            "seconds; 0: wait forever; by default 30, and 300 for steps on a CPU",
            "limits",
        ),
    ] = None
    crash_dir: Annotated[
        str | None,
        doc(
            "folder for reports about an engine that stalled or died: at most 8 files of 256 KiB, "
            "without texts and keys",
            "logging",
            metavar="DIR",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise BadRequest("tls_cert and tls_key need each other", param=missing)
        if self.standby and not self.supervise:
            raise BadRequest("standby needs the parent process", param="standby")
        if self.isolate_keys and not self.api_key and self.api_key_file is None:
            raise BadRequest("isolate_keys needs api_key or api_key_file", param="isolate_keys")
        if self.log_requests and self.log_level not in ("debug", "info"):
            raise BadRequest(
                f"log_requests logs at level info, which log_level {self.log_level} leaves out",
                param="log_requests",
            )

    @property
    def tls(self) -> tuple[str, str] | None:
        """The files of the certificate and of its key."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return self.tls_cert, self.tls_key
