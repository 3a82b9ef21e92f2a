"""The log as one JSON object for each record, also of the processes of ranks and replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_FIELDS: Final = "asyncllm_fields"


def fields(event: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``extra`` of a record whose values are to be read by programs.

    In JSON they stand in place of the message, which is then ``event``.
    """
    return {_FIELDS: {"message": event, **values}}


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message, and what the record is about.

    Exceptions are inside the object. Values that are None are left out.
    """

    def __init__(self, about: Callable[[], Mapping[str, Any]] = dict):
        """``about``: more members of a line, asked for each record."""
        super().__init__()
        self._about = about

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= self._about()
        values = getattr(record, _FIELDS, None)
        line |= {"message": record.getMessage()} if values is None else values
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        known = {name: _plain(value) for name, value in line.items() if value is not None}
        return msgspec.json.encode(known).decode()


def logs_json() -> bool:
    """Whether this process logs like that."""
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def _plain(value: object) -> object:
    """Text without lone surrogates, which JSON cannot hold."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
