"""Reading the configuration again while serving."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, Self

import msgspec
from aiohttp import web

from asyncllm.config import EngineConfig
from asyncllm.config.option_names import name_options, option_of
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import AsyncLLMError, BadRequest, Unauthorized
from asyncllm.server.http.answer import Answer, json_response
from asyncllm.server.http.route import Route
from asyncllm.server.limits.api_keys import Key, configured_keys, has_key
from asyncllm.server.service import Service
from asyncllm.supervise.tls import Tls
from asyncllm.system.daemon_thread import run_in_daemon

log = logging.getLogger(__name__)

#: What a reload swaps; all other options keep the values of the start.
RELOADED: Final = (
    "served_model_name",
    "api_key",
    "api_key_file",
    "requests_per_minute",
    "tokens_per_minute",
    "log_level",
    "tls_cert",
    "tls_key",
)


class Options(NamedTuple):
    """The command line and the file of ``--config``."""

    engine: EngineConfig
    server: ServerConfig


class InForce(NamedTuple):
    """What a server serves by, after its latest reload or since its start."""

    config: ServerConfig
    keys: tuple[Key, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return msgspec.msgpack.decode(data, type=cls)

    @classmethod
    def since_start(cls, config: ServerConfig) -> Self:
        """
        Raises:
            OSError, BadRequest: the file of API keys cannot be read, or is wrong.
        """
        return cls(config, configured_keys(config))


class Reloaded(Answer, kw_only=True):
    """``changed`` is in force now; ``needs_restart`` has changed since the start without effect."""

    changed: list[str]
    needs_restart: list[str]


def merged(start: ServerConfig, new: ServerConfig) -> ServerConfig:
    """``start`` with what a reload takes from ``new``.

    Raises:
        BadRequest: the two do not go together.
    """
    fields = {name: getattr(new, name) for name in RELOADED}
    if (start.tls is None) != (new.tls is None):
        fields |= {"tls_cert": start.tls_cert, "tls_key": start.tls_key}
    return ServerConfig(**msgspec.structs.asdict(start) | fields)


class _Prepared(NamedTuple):
    config: ServerConfig
    keys: tuple[Key, ...]
    context: ssl.SSLContext | None
    changed: list[str]
    needs_restart: list[str]


class Reloader:
    """Swaps names, keys, the log level and certificates in one step, or changes nothing.

    Attributes:
        read: reads the options again, in a thread; None where they did not come from files.
        start: the options that the process was started with.
        tls: of the listener.
        remember: has what will be in force outlive this process; called in a thread.
    """

    def __init__(self, service: Service):
        self.read: Callable[[], Options] | None = None
        self.start: Options | None = None
        self.tls: Tls | None = None
        self.remember: Callable[[bytes], None] | None = None
        self._service = service
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Future[Reloaded]] = set()

    async def reload(self) -> Reloaded:
        """Goes on to its end even if who waits for it is cancelled, such as a client that leaves.

        Raises:
            BadRequest: what is read is wrong; nothing has changed.
        """
        running = asyncio.ensure_future(self._reload())
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, reload: asyncio.Future[Reloaded]) -> None:
        self._running.discard(reload)
        if not reload.cancelled():
            reload.exception()  # whoever waits for it has it

    async def _reload(self) -> Reloaded:
        async with self._lock:
            new = await run_in_daemon(self._prepare)
            in_force = InForce(new.config, new.keys)
            # First: a client that sees a change must not lose it with this process.
            if self.remember is not None:
                await run_in_daemon(self.remember, in_force.encode())
            self.put_in_force(in_force)
            if self.tls is not None and new.context is not None:
                self.tls.context = new.context
        changed, left = map(_options, (new.changed, new.needs_restart))
        log.info("configuration read again; changed: %s", changed or "nothing")
        if left:
            log.warning("without effect until the next start: %s", left)
        return Reloaded(changed=new.changed, needs_restart=new.needs_restart)

    def put_in_force(self, new: InForce) -> None:
        self._service.reconfigure(new.config, new.keys)
        logging.getLogger("asyncllm").setLevel(new.config.log_level.upper())

    def _prepare(self) -> _Prepared:
        """All that may fail, in a thread: files may be slow."""
        if self.read is None or self.start is None:
            raise BadRequest("this server has no configuration that could be read again")
        options = self.read()
        old = self._service.config
        config = merged(old, options.server)
        try:
            keys = configured_keys(config)
        except OSError as error:
            raise BadRequest(f"api_key_file: {error}", param="api_key_file") from None
        if bool(keys) != bool(self._service.keys):
            raise BadRequest("whether clients need an API key cannot change without a restart")
        context = None
        if config.tls is not None:
            from asyncllm.supervise.tls import load_context

            context = load_context(*config.tls)
        changed = _differing(old, config)
        if self._service.keys.differ([key.text for key in keys]) and "api_key" not in changed:
            changed.append("api_key_file")
        left = _differing(self.start.engine, options.engine)
        left += [
            name
            for name in _differing(self.start.server, options.server)
            if getattr(options.server, name) != getattr(config, name)
        ]
        return _Prepared(config, keys, context, list(dict.fromkeys(changed)), left)


def _differing(one: msgspec.Struct, other: msgspec.Struct) -> list[str]:
    names: tuple[str, ...] = one.__struct_fields__
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _options(names: list[str]) -> str:
    return ", ".join(map(option_of, names))


async def reload_when_told(
    told: asyncio.Event, reloader: Reloader, done: Callable[[], None]
) -> None:
    """Reload each time the event is set; ``done`` is called whether it could or not."""
    while True:
        await told.wait()
        told.clear()
        try:
            await reloader.reload()
        except AsyncLLMError as error:
            log.error("nothing is reloaded: %s", name_options(error.message, error.param))
        except Exception:
            log.exception("nothing is reloaded")
        done()


RELOADER: Final = web.AppKey("asyncllm_reloader", Reloader)


async def reload_configuration(request: web.Request) -> web.Response:
    """For those with the admin key alone: API keys do not open it."""
    if not has_key(request, request.app[ADMIN_KEY]):
        raise Unauthorized("missing or incorrect admin key")
    return json_response(await request.app[RELOADER].reload())


ADMIN_KEY: Final = web.AppKey("asyncllm_admin_key", str)

ROUTE: Final = Route(
    method="POST",
    path="/admin/reload",
    asks="reload",
    handler=reload_configuration,
    summary="Read the configuration again: served names, API keys, log level, certificates",
    answers=(Reloaded,),
    refusals=(400, 401),
    needs_key=False,
)


def routes_for(config: ServerConfig) -> tuple[Route, ...]:
    """Without an admin key, the route does not exist."""
    return () if config.admin_key is None else (ROUTE,)


def add_reloader(app: web.Application, service: Service, config: ServerConfig) -> None:
    app[RELOADER] = Reloader(service)
    if config.admin_key is not None:
        app[ADMIN_KEY] = config.admin_key
