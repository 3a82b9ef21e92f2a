"""``asyncllm batch``: a file of OpenAI's requests, answered without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from asyncllm.cli.answer_file import answer_lines, append_answers, say
from asyncllm.cli.options import (
    BATCH_DEFAULTS,
    add_config_options,
    add_model,
    add_option,
    config_from_args,
    usage_error,
)
from asyncllm.cli.progress import LoadingBar
from asyncllm.cli.results import replace_file
from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest
from asyncllm.server_config import ServerConfig

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from asyncllm.cli.batch_file import BadItem, Item
    from asyncllm.cli.options import Commands
    from asyncllm.llm.async_llm import AsyncLLM


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a batch file of OpenAI's requests",
        description="Answer a batch file, as OpenAI has them: chat completions, completions, "
        "embeddings and responses, one request a line. A line that is wrong gets an error, and the "
        "others their answers.",
    )
    add_model(parser)
    parser.add_argument("file", type=Path, metavar="IN.jsonl", help="the requests")
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT.jsonl",
        help="the answers, one line each, in the order in which they finish",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where an earlier run stopped, and try again what failed",
    )
    text = "name of the model in the requests, its own by default; may be repeated"
    add_option(parser, "served_model_name", tuple[str, ...], text)
    add_config_options(parser, EngineConfig, defaults=BATCH_DEFAULTS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    engine = config_from_args(args, EngineConfig)
    server = config_from_args(args, ServerConfig)
    if args.output.resolve() == args.file.resolve():
        usage_error(args, "the answers would replace the requests")

    from asyncllm.cli.batch_file import Item, read_items
    from asyncllm.llm.async_llm import AsyncLLM

    items = read_items(args.file.read_bytes())
    answered = _answered(args)
    if answered:
        say(f"{len(answered)} of {len(items)} requests are answered already")
    todo = [item for item in items if not isinstance(item, Item) or item.custom_id not in answered]
    if not todo:
        return 0

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=engine, progress=LoadingBar()) as llm:
            return await _answer_all(llm, server, todo, out)

    return append_answers(args.output, main, go_on="with --resume it")


def _answered(args: argparse.Namespace) -> set[str]:
    """The custom_ids that need no answer; of the output, only theirs is kept.

    Raises:
        BadRequest: there is an output already that is not to be resumed, or is none of a batch.
    """
    from asyncllm.cli.batch_file import answered_lines

    content = args.output.read_bytes() if args.output.exists() else b""
    if content and not args.resume:
        raise BadRequest(f"{args.output} is there already; name another file or use --resume")
    try:
        answered = answered_lines(content)
    except ValueError as error:
        raise BadRequest(f"{args.output}: {error}") from error
    good = b"".join(answered.values())
    if good != content:
        replace_file(args.output, good)
    return set(answered)


async def _answer_all(
    llm: AsyncLLM, config: ServerConfig, items: Sequence[Item | BadItem], out: BinaryIO
) -> int:
    """Write a line for each item; returns how many of them failed."""
    from asyncllm.cli.batch_file import run_batch

    with answer_lines(out, llm, len(items), "request") as lines:
        await run_batch(
            llm, config, items, lambda result: lines.write(result.line, failed=result.failed)
        )
    return lines.failed
