"""How the log is written: lines for people, or one JSON object for each record."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.server_config import ServerConfig

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_FIELDS: Final = "asyncllm_fields"


def configure_logging(config: ServerConfig) -> None:
    """Set the root logger up, on stderr, for a process that serves."""
    handler = logging.StreamHandler()
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("asyncllm").setLevel(config.log_level.upper())


def fields(event: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``extra`` of a record whose values are to be read by programs.

    In JSON they stand in place of the message, which is then ``event``.
    """
    return {_FIELDS: {"message": event, **values}}


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message; what request it is about, if any.

    Exceptions are inside the object. Values that are None are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= _current_request()
        values = getattr(record, _FIELDS, None)
        line |= {"message": record.getMessage()} if values is None else values
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        known = {name: _plain(value) for name, value in line.items() if value is not None}
        return msgspec.json.encode(known).decode()


def _current_request() -> dict[str, str]:
    """What the current task serves, if it serves a request."""
    # The process that supervises the server has no requests, and stays small without aiohttp.
    if "aiohttp" not in sys.modules:
        return {}
    from asyncllm.engine.tenants import tenant_label
    from asyncllm.server.http.middleware import request_id, request_tenant

    given = request_id.get(None)
    return {"request_id": given, "tenant": tenant_label(request_tenant.get(""))} if given else {}


def _plain(value: object) -> object:
    """Text without lone surrogates, which JSON cannot hold."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
