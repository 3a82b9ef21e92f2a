"""``asyncllm generate``: answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from asyncllm.cli.answer_file import answer_lines, append_answers, say
from asyncllm.cli.options import add_option, add_options, config_from_args, usage_error
from asyncllm.cli.progress import LoadingBar
from asyncllm.cli.prompts import Row, read_rows
from asyncllm.cli.results import answer_line, error_line, recover
from asyncllm.cli.sampling import add_sampling_options, check_sampling_options, sampling_params
from asyncllm.config import EngineConfig, PolicyName
from asyncllm.errors import AsyncLLMError, EngineDead

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from asyncllm.api import AsyncLLM
    from asyncllm.cli.options import Commands
    from asyncllm.types import SamplingParams


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a file of prompts",
        description="Answer a file of prompts. Run it again after an interruption: it goes on "
        "where it stopped, and tries the prompts again that failed.",
        allow_abbrev=False,
    )
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
    parser.add_argument("--overwrite", action="store_true", help="forget what OUT.jsonl has")
    add_sampling_options(parser)
    add_option(
        parser,
        "policy",
        PolicyName,
        "who is served next; a batch ends sooner when its longest answers begin first "
        "(default: longest)",
    )
    add_options(parser, EngineConfig, title="engine", skip=("policy",))
    parser.set_defaults(run=run, parser=parser, policy="longest", itl_target_ms=0.0)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args, EngineConfig)
    check_sampling_options(args)
    if args.output.resolve() == args.file.resolve():
        usage_error(args, "the output would replace the prompts")
    rows = read_rows(args.file, args.field)
    answered = set() if args.overwrite else recover(args.output, rows)
    if answered:
        say(f"{len(answered)} of {len(rows)} prompts are answered already")
    if len(answered) == len(rows):
        return 0

    from asyncllm.api import AsyncLLM

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
            if args.overwrite:  # not before the model is there
                out.truncate(0)
            params = sampling_params(args, llm.default_params)
            todo = [row for row in rows if row.index not in answered]
            return await _answer_all(llm, todo, params, out)

    return append_answers(args.output, main, go_on="the same command")


async def _answer_all(
    llm: AsyncLLM, rows: Sequence[Row], params: SamplingParams | None, out: BinaryIO
) -> int:
    """Write an answer or an error for each row; returns the number of errors.

    Raises:
        EngineDead: no further row could be answered either.
    """
    from asyncllm.offline import Intake

    intake = Intake(llm)
    with answer_lines(out, llm, len(rows), "prompt") as lines:

        async def answer(row: Row) -> None:
            try:
                ids = await intake.encode(row.prompt)
                line = answer_line(row, await llm.generate(ids, params))
            except EngineDead:
                raise
            except AsyncLLMError as error:
                lines.write(error_line(row, error), failed=True)
            else:
                lines.write(line, failed=False)

        await intake.run(answer, rows)
    return lines.failed
