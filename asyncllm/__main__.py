"""The command line: ``asyncllm COMMAND``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from asyncllm.cli.parser import CommandParser
from asyncllm.errors import AsyncLLMError
from asyncllm.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

#: A command's line in ``--help``. ``configure(parser)`` of asyncllm.cli.commands.NAME has the rest.
COMMANDS: Final = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "chat": "talk to a model in the terminal",
    "generate": "answer a file of prompts",
    "batch": "answer a batch file of OpenAI's requests",
    "bench": "measure how fast a model is",
    "replay": "run the scheduler again on what serve --trace recorded",
    "doctor": "say what fits on which GPUs, or here, and how fast it will be",
    "models": "list the families of models that are served, or what one model needs",
    "kernels": "compile GPU kernels ahead of time",
}

_EXAMPLES: Final = """\
examples:
  asyncllm chat                                   talk to the built-in demo model
  asyncllm serve Qwen/Qwen3-0.6B --port 8000      serve a model from the Hugging Face Hub
  asyncllm generate Qwen/Qwen3-0.6B prompts.jsonl -o answers.jsonl

The model comes first, as a folder or a hub id; without one, a command runs the demo model.
'asyncllm COMMAND --help' lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 success, 1 failure, 130 interrupted.

    Wrong usage exits with status 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Only the command that runs is imported.
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        args = _parser(command).parse_args(words)
        run: Callable[[Namespace], int] = args.run
        return run(args)
    except AsyncLLMError as error:
        from asyncllm.config.option_names import name_options

        print(f"asyncllm: error: {name_options(error.message, error.param)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = error.filename is not None and error.strerror
        message = f"{error.filename}: {error.strerror}" if named else str(error)
        print(f"asyncllm: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(command: str) -> CommandParser:
    """The parser of the program, with the options of one command."""
    parser = CommandParser(
        prog="asyncllm",
        description="Serves large language models from one asyncio process.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        parser_of_command = commands.add_parser(name, help=text)
        if name == command:
            import_module(f"asyncllm.cli.commands.{name}").configure(parser_of_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
