"""``asyncllm batch``: a file of OpenAI's requests, answered without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from asyncllm.cli.options import add_option, add_options, config_from_args, usage_error
from asyncllm.cli.progress import LoadingBar
from asyncllm.cli.results import replace_file
from asyncllm.config import EngineConfig, PolicyName, ServerConfig
from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.api import AsyncLLM
    from asyncllm.batch import BadItem, Item, Result
    from asyncllm.cli.options import Commands


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a batch file of OpenAI's requests",
        description="Answer a batch file, as OpenAI has them: chat completions, completions and "
        "embeddings, one request a line. A line that is wrong gets an error, and the others their "
        "answers.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="IN.jsonl", help="the requests")
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT.jsonl",
        help="the answers, one line each, in the order in which they finish",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        help="folder or hub id; the built-in demo when none is named",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where an earlier run stopped, and try again what failed",
    )
    text = "name of the model in the requests, its own by default; may be repeated"
    add_option(parser, "served_model_name", tuple[str, ...], text)
    add_option(parser, "policy", PolicyName, "who is served next (default: longest)")
    add_options(parser, EngineConfig, title="engine", skip=("model", "policy"))
    parser.set_defaults(run=run, parser=parser, policy="longest", itl_target_ms=0.0)


def run(args: argparse.Namespace) -> int:
    engine = config_from_args(args, EngineConfig)
    server = config_from_args(args, ServerConfig)
    if args.output.resolve() == args.file.resolve():
        usage_error(args, "the answers would replace the requests")

    from asyncllm.api import AsyncLLM
    from asyncllm.batch import Item, read_items
    from asyncllm.loop_thread import new_event_loop

    items = read_items(args.file.read_bytes())
    answered = _answered(args)
    if answered:
        _say(f"{len(answered)} of {len(items)} requests are answered already")
    todo = [item for item in items if not isinstance(item, Item) or item.custom_id not in answered]
    if not todo:
        return 0

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=engine, progress=LoadingBar()) as llm:
            return await _answer_all(llm, server, todo, out)

    # The thread that drives the device must get the GIL back at once; the default is 5 ms.
    sys.setswitchinterval(1e-4)
    try:
        with (
            args.output.open("ab") as out,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            failed = runner.run(main(out))
    except KeyboardInterrupt:
        _say("interrupted; with --resume it goes on from here")
        raise
    return 1 if failed else 0


def _answered(args: argparse.Namespace) -> set[str]:
    """The custom_ids that need no answer; of the output, only theirs is kept.

    Raises:
        BadRequest: there is an output already that is not to be resumed, or is none of a batch.
    """
    from asyncllm.batch import answered_lines

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
    from tqdm import tqdm

    from asyncllm.batch import run_batch
    from asyncllm.offline import Speed

    speed = Speed(llm.stats)
    failed = 0

    def done(result: Result) -> None:
        nonlocal failed
        failed += result.failed
        out.write(result.line)
        out.flush()
        bar.set_postfix_str(str(speed), refresh=False)
        bar.update()

    with tqdm(total=len(items), unit="request") as bar:
        await run_batch(llm, config, items, done)
    _say(
        f"{len(items) - failed} requests answered, {failed} failed: {speed.tokens:,} tokens in "
        f"{speed.seconds:,.1f} s, {speed}"
    )
    return failed


def _say(message: str) -> None:
    print(message, file=sys.stderr)
