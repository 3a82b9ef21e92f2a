"""One line in the log for each request: tenant, model, tokens, times, errors. Never its text."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from asyncllm.engine.tenants import tenant_label
from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.middleware import request_id
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.system.json_log import fields

if TYPE_CHECKING:
    from asyncllm.engine.requests.history import RequestTrace
    from asyncllm.server.observe.entry import Entry

log = logging.getLogger(__name__)

#: Clients choose some of the words; none may break the line or fill the log.
_UNPRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_MAX_WORD: Final = 100
#: Stands in a line for what is not known.
_UNKNOWN: Final = "-"


def log_request(entry: Entry) -> None:
    """Log a request that has ended; not probes and scrapes."""
    if entry.is_probe:
        return
    head = {
        "id": request_id.get(),
        "method": entry.request.method,
        "route": _word(entry.route),
        "status": entry.status,
    }
    tenant = tenant_of(entry.request)
    work, error = _work(entry), _error(entry)
    named = {"model": _word(entry.model), "tenant": _word(tenant), **work, **error}
    named["total_ms"] = _ms(entry.seconds)
    words = [str(value) for value in head.values()]
    for name, value in named.items():
        short, unit = (name[:-3], "ms") if name.endswith("_ms") else (name, "")
        words.append(f"{short}={_UNKNOWN}" if value is None else f"{short}={value}{unit}")
    head.pop("id")  # every line in JSON has it
    known = {name: value for name, value in named.items() if value != _UNKNOWN}
    known["tenant"] = tenant_label(tenant)
    log.info("request %s", " ".join(words), extra=fields("request", head | known))


def _work(entry: Entry) -> dict[str, Any]:
    """What the engine did; None where it no longer knows."""
    traces = entry.traces()
    if traces is None:
        return {}
    if not traces:
        return dict.fromkeys(("prompt", "cached", "output", "finish", "ttft_ms"))
    return {
        "prompt": sum(trace.prompt_tokens for trace in traces),
        "cached": sum(trace.cached_tokens for trace in traces),
        "output": sum(trace.completion_tokens for trace in traces),
        "finish": ",".join(dict.fromkeys(trace.outcome for trace in traces)),
        "ttft_ms": _ttft_ms(entry, traces),
    }


def _ttft_ms(entry: Entry, traces: list[RequestTrace]) -> float | None:
    """From the request's arrival here; the engine's clock need not be ours."""
    firsts = [t.first_token - t.arrived for t in traces if t.first_token is not None]
    return _ms(entry.queued_after + min(firsts)) if firsts else None


def _error(entry: Entry) -> dict[str, Any]:
    error = entry.failure
    if not isinstance(error, AsyncLLMError):
        return {}
    return {"error": error.type, "code": _word(error.code), "param": _word(error.param)}


def _word(text: str | None) -> str:
    return _UNPRINTABLE.sub("?", text or "")[:_MAX_WORD] or _UNKNOWN


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
