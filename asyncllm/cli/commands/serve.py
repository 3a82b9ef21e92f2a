"""``asyncllm serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from asyncllm.cli.options import add_config_options, add_model, config_from_args
from asyncllm.cli.parser import UsageError
from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest
from asyncllm.server.observe.log_format import configure_logging
from asyncllm.server_config import ServerConfig
from asyncllm.supervise.listening import listen
from asyncllm.supervise.supervisor import Supervisor
from asyncllm.terminal import LoadingBar

if TYPE_CHECKING:
    from asyncllm.supervise.child import Parent


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Serve a model over HTTP, with OpenAI's API."
    add_model(parser)
    add_config_options(parser, EngineConfig, ServerConfig)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    engine, server = _options(args)
    configure_logging(server)
    if not server.supervise or not _can_fork():
        return _serve(args, engine, server)
    sockets = listen(server.host, server.port)
    if sockets is None:
        return 1
    parent = Supervisor(sockets, server.drain_seconds, server.tls).run()
    return parent if isinstance(parent, int) else _serve(args, engine, server, parent)


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
        if engine.gpu is not None:
            from asyncllm.startup.preload import preload_cuda

            preload_cuda(engine.gpu)

        from asyncllm.llm.async_llm import AsyncLLM
        from asyncllm.server.reload import Options, merged
        from asyncllm.server.run import run as serve

        def read() -> Options:
            return Options(*_read_again(args))

        start = Options(engine, server)
        if parent is not None and parent.restarts:  # as it is since the latest reload
            server = merged(server, read().server)
        bar = LoadingBar() if server.log_format == "text" else None
        return serve(
            partial(AsyncLLM, config=engine, progress=bar),
            server,
            parent=parent,
            options=(start, read),
        )
    finally:
        gc.enable()  # also if nothing was served
