"""The command line: ``asyncllm serve | chat | generate | batch | bench | replay | kernels``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from asyncllm import __version__
from asyncllm.cli.commands import batch, bench, chat, generate, kernels, replay, serve
from asyncllm.cli.parser import CommandParser
from asyncllm.errors import AsyncLLMError
from asyncllm.option_names import name_options

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence


_EXAMPLES = """\
examples:
  asyncllm chat                                   talk to the built-in demo model
  asyncllm serve Qwen/Qwen3-0.6B --port 8000      serve a model from the Hugging Face Hub
  asyncllm generate Qwen/Qwen3-0.6B prompts.jsonl -o answers.jsonl

The model comes first, as a folder or a hub id; without one, a command runs the demo model.
'asyncllm COMMAND --help' lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 all went well, 1 it did not, 130 interrupted.

    Wrong usage leaves with status 2.
    """
    parser = CommandParser(
        prog="asyncllm",
        description="Serves large language models from one asyncio process.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, chat, generate, batch, bench, replay, kernels):
        command.add_command(commands)
    args = parser.parse_args(argv)
    run: Callable[[Namespace], int] = args.run
    try:
        return run(args)
    except AsyncLLMError as error:
        print(f"asyncllm: error: {name_options(error.message, error.param)}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"asyncllm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
