"""``asyncllm serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import gc
from functools import partial

from asyncllm.cli.options import add_config_options, add_model, config_from_args
from asyncllm.cli.progress import LoadingBar
from asyncllm.config import EngineConfig
from asyncllm.server_config import ServerConfig
from asyncllm.startup.preload import preload_cuda


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Serve a model over HTTP, with OpenAI's API."
    add_model(parser)
    add_config_options(parser, EngineConfig, ServerConfig)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    engine = config_from_args(args, EngineConfig)
    server = config_from_args(args, ServerConfig)
    # What start-up makes is there to stay; ``collect_when_quiet`` turns collections on again.
    gc.disable()
    try:
        if engine.gpu is not None:
            preload_cuda(engine.gpu)

        from asyncllm.llm.async_llm import AsyncLLM
        from asyncllm.server.observe.log_format import configure_logging
        from asyncllm.server.run import run as serve

        configure_logging(server)
        bar = LoadingBar() if server.log_format == "text" else None
        return serve(partial(AsyncLLM, config=engine, progress=bar), server)
    finally:
        gc.enable()  # also if nothing was served
