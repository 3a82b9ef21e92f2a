"""``asyncllm batch``: answer a file of OpenAI's requests without a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import BinaryIO

from asyncllm.cli import options
from asyncllm.cli.answer_file import answer_lines, append_answers, keep_answered, say
from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.system.terminal import LoadingBar


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer a batch file in OpenAI's format: chat completions, completions, embeddings and "
        "responses, one request per line. A wrong line gets an error; the other lines are "
        "answered."
    )
    options.add_model(parser)
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
        help="continue an earlier run, and try again the requests that failed",
    )
    text = "name of the model in the requests, its own by default; may be repeated"
    options.add_option(parser, "served_model_name", tuple[str, ...], text)
    options.add_config_options(parser, EngineConfig, defaults=options.BATCH_DEFAULTS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    engine = options.config_from_args(args, EngineConfig)
    server = options.config_from_args(args, ServerConfig)
    if args.output.resolve() == args.file.resolve():
        options.usage_error(args, "the answers would replace the requests")

    from asyncllm.cli.batch_file import Item, read_items, run_batch
    from asyncllm.llm.async_llm import AsyncLLM

    items = read_items(args.file.read_bytes())
    answered = _answered(args.output, resume=args.resume)
    if answered:
        say(f"{len(answered)} of {len(items)} requests are answered already")
    todo = [item for item in items if not isinstance(item, Item) or item.custom_id not in answered]
    if not todo:
        return 0

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=engine, progress=LoadingBar()) as llm:
            with answer_lines(out, llm, len(todo), "request") as lines:
                await run_batch(llm, server, todo, lines.write)
            return lines.failed

    return append_answers(args.output, main, resume="with --resume it")


def _answered(output: Path, *, resume: bool) -> set[str]:
    """The custom_ids that are answered already; only their lines are kept.

    Raises:
        BadRequest: the file exists and may not be resumed, or has no answers of a batch.
    """
    from asyncllm.cli.batch_file import answered_id

    if not resume and output.exists() and output.stat().st_size:
        raise BadRequest(f"{output} is there already; name another file or use --resume")
    try:
        return keep_answered(output, answered_id)
    except ValueError as error:
        raise BadRequest(f"{output}: {error}") from error
