"""``asyncllm generate``: answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from asyncllm.cli.answer_file import answer_lines, append_answers, say
from asyncllm.cli.options import (
    BATCH_DEFAULTS,
    add_config_options,
    add_model,
    config_from_args,
    usage_error,
)
from asyncllm.cli.progress import LoadingBar
from asyncllm.cli.prompts import READERS, Row, as_chat, read_rows
from asyncllm.cli.results import answer_line, error_line, recover
from asyncllm.cli.sampling import add_sampling_options, check_sampling_options, sampling_params
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from asyncllm.cli.options import Commands
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.types import SamplingParams


_EXAMPLES = """\
examples:
  asyncllm generate prompts.txt -o answers.jsonl                         the demo model
  asyncllm generate Qwen/Qwen3-0.6B prompts.txt -o answers.jsonl --chat"""


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a file of prompts",
        description="Answer a file of prompts. Run it again after an interruption: it goes on "
        "where it stopped, and tries the prompts again that failed.",
        epilog=_EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=".txt (a prompt per line), .csv or .jsonl (text, token ids or chat messages)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT.jsonl",
        help="one line per prompt, in the order in which they finish; 'index' counts from 0",
    )
    parser.add_argument(
        "--column",
        "--field",
        dest="field",
        metavar="NAME",
        help="where the prompt is in a .csv or .jsonl; by default 'prompt', in .jsonl also "
        "'messages', in .csv also the only column",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each text as a user's message, through the model's chat template",
    )
    parser.add_argument("--overwrite", action="store_true", help="forget what OUT.jsonl has")
    add_sampling_options(parser)
    add_config_options(parser, EngineConfig, defaults=BATCH_DEFAULTS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args, EngineConfig)
    check_sampling_options(args)
    if args.output.resolve() == args.file.resolve():
        usage_error(args, "the output would replace the prompts")
    rows = _read(args)
    answered = set() if args.overwrite else recover(args.output, rows)
    if answered:
        say(f"{len(answered)} of {len(rows)} prompts are answered already")
    if len(answered) == len(rows):
        return 0

    from asyncllm.llm.async_llm import AsyncLLM

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
            if args.overwrite:  # not before the model is there
                out.truncate(0)
            params = sampling_params(args, llm.default_params)
            todo = [row for row in rows if row.index not in answered]
            return await _answer_all(llm, todo, params, out, chat=args.chat)

    return append_answers(args.output, main, go_on="the same command")


def _read(args: argparse.Namespace) -> list[Row]:
    """The prompts, all of which can be asked as they are to be."""
    if args.file.suffix.lower() not in READERS:
        usage_error(
            args,
            f"{args.file} is not a file of prompts, whose name ends in {', '.join(READERS)}; "
            "the order is [MODEL] FILE",
        )
    rows = read_rows(args.file, args.field)
    if args.chat:
        for row in rows:
            if not isinstance(row.prompt, str) and row.key == "prompt":
                raise BadRequest(
                    f"{args.file}: prompt {row.index} is token ids, which --chat refuses"
                )
    return rows


async def _answer_all(
    llm: AsyncLLM,
    rows: Sequence[Row],
    params: SamplingParams | None,
    out: BinaryIO,
    *,
    chat: bool,
) -> int:
    """Write an answer or an error for each row; returns the number of errors.

    Raises:
        EngineDead: no further row could be answered either.
    """
    from asyncllm.llm.generation import Intake

    intake = Intake(llm)
    with answer_lines(out, llm, len(rows), "prompt") as lines:

        async def answer(row: Row) -> None:
            prompt = as_chat(row.prompt) if chat else row.prompt
            try:
                line = answer_line(row, await intake.generate(prompt, params))
            except EngineDead:
                raise
            except AsyncLLMError as error:
                lines.write(error_line(row, error), failed=True)
            else:
                lines.write(line, failed=False)

        await intake.run(answer, rows)
    return lines.failed
