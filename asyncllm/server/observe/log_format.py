"""How the server's log is written: lines for people, or one JSON object for each record."""

from __future__ import annotations

import logging
import sys
from typing import Final

from asyncllm.config.server_config import ServerConfig
from asyncllm.system.json_log import JsonFormatter

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(config: ServerConfig) -> None:
    """Set the root logger up, on stderr, for a process that serves."""
    handler = logging.StreamHandler()
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(current_request))
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("asyncllm").setLevel(config.log_level.upper())


def current_request() -> dict[str, str]:
    """The request that the current task serves, and its tenant, if it serves one."""
    # The process that supervises the server has no requests, and stays small without aiohttp.
    if "aiohttp" not in sys.modules:
        return {}
    from asyncllm.engine.tenants import tenant_label
    from asyncllm.server.http.middleware import request_id, request_tenant

    given = request_id.get(None)
    return {"request_id": given, "tenant": tenant_label(request_tenant.get(""))} if given else {}
