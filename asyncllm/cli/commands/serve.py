"""``asyncllm serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Final

from asyncllm.cli.options import add_config_options, add_model, config_from_args, usage_error
from asyncllm.cli.parser import UsageError
from asyncllm.config import EngineConfig
from asyncllm.config.option_names import name_options
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.kernels.cuda_driver import load_driver
from asyncllm.server.observe.log_format import configure_logging
from asyncllm.supervise.child import Parent
from asyncllm.supervise.crowd import allow_all_files
from asyncllm.supervise.front.hosts import hosts_of
from asyncllm.supervise.listening import listen
from asyncllm.supervise.standard_files import open_standard_files
from asyncllm.supervise.supervisor import Supervisor
from asyncllm.system.terminal import LoadingBar

if TYPE_CHECKING:
    from asyncllm.llm.compile_ahead import CompileAhead

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a model over HTTP, with OpenAI's API."
    add_model(parser)
    add_config_options(parser, EngineConfig, ServerConfig, RayConfig)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    open_standard_files()
    server = config_from_args(args, ServerConfig)
    configure_logging(server)  # before what the engine's options have to say
    engine = config_from_args(args, EngineConfig)
    allow_all_files()
    ray = config_from_args(args, RayConfig)
    if ray.ray:
        return _serve_on_ray(args, engine, server, ray)
    if engine.dp > 1:
        _check_replicas(args, server)
    if not server.supervise or not _can_fork():
        return _serve(args, engine, server)
    sockets = listen(server.host, server.port)
    if sockets is None:
        return 1
    if engine.dp == 1:
        supervisor = Supervisor(sockets, server.drain_seconds, server.tls)
    else:
        from asyncllm.supervise.front.front import Front

        seconds, hosts = server.request_seconds, hosts_of(server)
        door = partial(Front, num_replicas=engine.dp, request_seconds=seconds, hosts=hosts)
        supervisor = Supervisor(
            sockets, server.drain_seconds, num_servers=engine.dp, make_door=door
        )
    parent = supervisor.run()
    return parent if isinstance(parent, int) else _serve(args, engine, server, parent)


def _serve_on_ray(
    args: argparse.Namespace, engine: EngineConfig, server: ServerConfig, config: RayConfig
) -> int:
    if engine.dp > 1:
        usage_error(args, "--dp: with --ray, the replicas are Ray's")
    try:
        from asyncllm.ray.local import run as serve
    except ImportError as error:
        usage_error(args, f"--ray needs asyncllm-server[ray]: {error}")
    try:
        return serve(engine, server, config)
    except BadRequest as error:
        usage_error(args, name_options(error.message, error.param))


def _check_replicas(args: argparse.Namespace, server: ServerConfig) -> None:
    """Exit with a usage error if replicas cannot be served like this."""
    if server.tls is not None:
        # A connection under TLS cannot pass to another process.
        usage_error(args, "--tls-cert: with --dp above 1, let a proxy before the server do TLS")
    if not server.supervise:
        usage_error(args, "--no-supervise: replicas (--dp above 1) need the parent process")
    if server.standby:
        usage_error(args, "--standby: only for a single server, not for replicas (--dp above 1)")
    if not _can_fork():
        usage_error(args, "--dp: replicas need Linux, and a program without threads or torch")


def _options(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    return config_from_args(args, EngineConfig), config_from_args(args, ServerConfig)


def _read_again(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The command line with the file of ``--config`` as it is now.

    Raises:
        BadRequest: an option is wrong.
    """
    try:
        return _options(args.parser.parse_quietly(args.words))
    except UsageError as error:
        raise BadRequest(str(error)) from None


def _can_fork() -> bool:
    """Not in a program that runs this command besides other things, in threads or with torch."""
    is_small = threading.active_count() == 1 and "torch" not in sys.modules
    return sys.platform == "linux" and is_small


def _serve(
    args: argparse.Namespace,
    engine: EngineConfig,
    server: ServerConfig,
    parent: Parent | None = None,
) -> int:
    """Serve in this process."""
    # What start-up makes is there to stay; ``collect_when_quiet`` turns collections on again.
    gc.disable()
    try:
        started_with = engine
        if parent is not None and parent.replica is not None:
            from asyncllm.executor.startup.replica_config import replica_config

            engine = replica_config(engine, parent.replica)
        if parent is not None and parent.is_standby:
            import_ahead(engine)
            parent.stand_by()
        try:
            folder = _find_model(engine)
        except ModelError as error:  # before anything large is imported
            log.error("cannot load the model: %s", error.message)
            return 1
        kernels = _begin_early(engine, folder)

        from asyncllm.llm.async_llm import AsyncLLM
        from asyncllm.server.reload import Options
        from asyncllm.server.run import run as serve

        def read() -> Options:
            return Options(*_read_again(args))

        shows_bar = server.log_format == "text" and (parent is None or not parent.replica)
        bar = LoadingBar() if shows_bar else None
        return serve(
            partial(AsyncLLM, config=engine, progress=bar, kernels=kernels),
            server,
            parent=parent,
            options=(Options(started_with, server), read),
        )
    finally:
        gc.enable()  # also if nothing was served


def _find_model(engine: EngineConfig) -> Path | None:
    """The model's folder; None if it is to be downloaded.

    Raises:
        ModelError: there is no such folder, or it is not a model's.
    """
    from asyncllm.models.loading.hub import find_folder
    from asyncllm.models.wrong_files import about_folder

    folder = find_folder(engine.model)
    if folder is not None and not (folder / "config.json").is_file():
        raise ModelError(about_folder(folder))
    return folder


def _begin_early(engine: EngineConfig, folder: Path | None) -> CompileAhead | None:
    """Begin what can run beside the import of large modules; returns the compilation of kernels."""
    if folder is not None and engine.device != "sim" and engine.load_format == "auto":
        from asyncllm.executor.startup.preload import read_ahead

        read_ahead(folder)
    if engine.gpu is None:
        return None
    kernels = None
    if folder is not None:
        from asyncllm.llm.compile_ahead import CompileAhead

        kernels = CompileAhead(engine, folder)
    from asyncllm.executor.startup.preload import preload_cuda

    preload_cuda(engine.gpu)
    return kernels


#: What a standby imports: the server,
SERVER: Final = (
    "asyncllm.llm.async_llm",
    "asyncllm.server.reload",
    "asyncllm.server.run",
    "asyncllm.executor.startup.preload",
)
#: and what libraries import where they first need it.
LATE: Final = ("encodings.idna", "rich.live", "rich.progress", "uvloop")


def import_ahead(config: EngineConfig) -> None:
    """Import all that a server needs up to its first token; log the seconds and the memory.

    The driver of a GPU is initialised; no memory of the GPU is taken.
    """
    begun = time.perf_counter()
    _import((*SERVER, *LATE))
    if config.device != "sim":
        _import(["asyncllm.executor.leader"])
        _import_all("asyncllm.models.families")
        if config.gpu is not None:
            _import_kernels()
            load_driver()
    log.info("standing by after %.1f s: %s", time.perf_counter() - begun, _memory())


def _import_kernels() -> None:
    with suppress(ImportError):  # without Triton; the server says so
        _import_all("asyncllm.kernels.triton")
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of half a gigabyte, which the first kernel would wait for


def _import(names: Sequence[str]) -> None:
    for name in names:
        import_module(name)


def _import_all(package: str) -> None:
    _import([found.name for found in walk_packages(import_module(package).__path__, f"{package}.")])


def _memory() -> str:
    """What this process takes of the host's memory."""
    sizes: dict[str, int] = {}
    with suppress(OSError), open("/proc/self/smaps_rollup", encoding="utf-8") as rollup:
        for line in rollup:
            name, *rest = line.split()
            if rest[-1] == "kB":
                sizes[name] = int(rest[0])
    own = sizes.get("Private_Clean:", 0) + sizes.get("Private_Dirty:", 0)
    return f"{sizes.get('Rss:', 0) >> 10} MiB, {own >> 10} of them not shared"
