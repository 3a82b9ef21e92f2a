"""The command line: ``asyncllm serve | chat | generate | batch | bench | replay | kernels``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from asyncllm import __version__
from asyncllm.cli import batch, bench, chat, generate, kernels, replay, serve
from asyncllm.errors import AsyncLLMError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 all went well, 1 it did not, 130 interrupted.

    Wrong usage leaves with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="asyncllm", description="Serves large language models from one asyncio process."
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, chat, generate, batch, bench, replay, kernels):
        command.add_command(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (AsyncLLMError, OSError) as error:
        print(f"asyncllm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
