"""``asyncllm generate``: answer a file of prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from asyncllm.cli import options
from asyncllm.cli.answer_file import AnswerLines, answer_lines, append_answers, keep_answered, say
from asyncllm.cli.prompts import READERS, Row, as_chat, read_rows
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead
from asyncllm.system.terminal import LoadingBar
from asyncllm.types import Completion, SamplingParams

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

#: Fields of EngineConfig that an answer depends on.
_MODEL: Final = (
    *("model", "revision", "tokenizer", "chat_template", "load_format", "dtype"),
    *("quantization", "kv_cache_dtype", "max_model_len"),
)

_EXAMPLES: Final = """\
examples:
  asyncllm generate prompts.txt -o answers.jsonl                         the demo model
  asyncllm generate Qwen/Qwen3-0.6B prompts.txt -o answers.jsonl --chat"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer a file of prompts. After an interruption, run the same command again: it "
        "continues where it stopped, and tries failed prompts again."
    )
    parser.epilog = _EXAMPLES
    options.add_model(parser)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help=".txt (a prompt per line), .csv or .jsonl (text, token ids or chat messages); the "
        "last two may have max_tokens for a prompt",
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
        help="name of the column or field that has the prompt; by default 'prompt', in .jsonl "
        "also 'messages', in .csv also the only column",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each text as a user's message, through the model's chat template",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="begin again and overwrite OUT.jsonl"
    )
    options.add_sampling_options(parser)
    options.add_config_options(parser, EngineConfig, defaults=options.BATCH_DEFAULTS)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    config = options.config_from_args(args, EngineConfig)
    options.check_sampling_options(args)
    if args.output.resolve() == args.file.resolve():
        options.usage_error(args, "the output would replace the prompts")
    rows = _read(args)
    settings = _settings(args, config)
    answered = set() if args.overwrite else recover(args.output, rows, settings)
    if answered:
        say(f"{len(answered)} of {len(rows)} prompts are answered already")
    if len(answered) == len(rows):
        return 0

    from asyncllm.llm.async_llm import AsyncLLM

    async def main(out: BinaryIO) -> int:
        async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
            if args.overwrite:  # not before the model is there
                out.truncate(0)
            params = options.sampling_params(args, llm.default_params)
            todo = [row for row in rows if row.index not in answered]
            with answer_lines(out, llm, len(todo), "prompt") as lines:
                await _answer_all(llm, todo, params, lines, settings)
            return lines.failed

    return append_answers(args.output, main, resume="the same command")


def _settings(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """What answers depend on, apart from the prompts."""
    model = {name: getattr(config, name) for name in _MODEL}
    model["simulated"] = config.device == "sim"
    return {**model, "chat": args.chat, **options.given_options(args, SamplingParams)}


def _read(args: argparse.Namespace) -> list[Row]:
    """The prompts, checked against the options."""
    if args.file.suffix.lower() not in READERS:
        options.usage_error(
            args,
            f"{args.file} is not a file of prompts, whose name ends in {', '.join(READERS)}; "
            "the order is [MODEL] FILE",
        )
    rows = read_rows(args.file, args.field)
    for row in rows:
        if args.chat and not isinstance(row.prompt, str) and row.key == "prompt":
            raise BadRequest(f"{args.file}: prompt {row.index} is token ids, which --chat refuses")
        try:
            _ = row.max_tokens  # a property that checks it
        except BadRequest as error:
            raise BadRequest(f"{args.file}: {error.message}") from error
    return rows


async def _answer_all(
    llm: AsyncLLM,
    rows: Sequence[Row],
    params: SamplingParams | None,
    lines: AnswerLines,
    settings: dict[str, Any],
) -> None:
    """Write an answer or an error for each row.

    Raises:
        EngineDead: no further row could be answered either.
    """
    from asyncllm.llm.generation import Intake

    intake = Intake(llm)

    async def answer(row: Row) -> None:
        own = params
        if row.max_tokens is not None:
            own = msgspec.structs.replace(params or llm.default_params, max_tokens=row.max_tokens)
        prompt = as_chat(row.prompt) if settings["chat"] else row.prompt
        try:
            answered = await intake.generate(prompt, own)
        except EngineDead:
            raise
        except AsyncLLMError as error:
            lines.write(error_line(row, error), failed=True)
        else:
            line = answer_line(row, answered, fingerprint(settings, row))
            lines.write(line, failed=False)

    await intake.run(answer, rows)


def fingerprint(settings: Mapping[str, Any], row: Row) -> str:
    """A short name for the settings that a prompt is answered with, its own max_tokens included."""
    content = msgspec.json.encode([settings, row.max_tokens], order="deterministic")
    return blake2b(content, digest_size=6).hexdigest()


def answer_line(row: Row, answer: Completion, settings: str) -> bytes:
    """The line of an answered prompt; ``settings`` is their ``fingerprint``."""
    line: dict[str, Any] = {
        "index": row.index,
        row.key: row.prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": answer.usage,
        "settings": settings,
    }
    if row.rest:
        line["input"] = row.rest
    return msgspec.json.encode(line) + b"\n"


def error_line(row: Row, error: AsyncLLMError) -> bytes:
    """The line of a failed prompt; the next run tries it again."""
    return msgspec.json.encode({"index": row.index, "error": error.message}) + b"\n"


def recover(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> set[int]:
    """Prepare to resume an interrupted run: keep only complete lines of answers.

    Returns:
        The indexes of the prompts that are answered already.

    Raises:
        BadRequest: these are not answers to ``rows`` with ``settings``; the file is unchanged.
    """

    def index_of(line: bytes, number: int) -> int | None:
        try:
            result = msgspec.json.decode(line, type=_Result)
        except msgspec.DecodeError as error:
            raise _mismatch(path, number, str(error)) from error
        if result.index >= len(rows):
            raise _mismatch(path, number, f"there are only {len(rows)} prompts")
        if result.error is not None:
            return None
        row = rows[result.index]
        if getattr(result, row.key) != row.prompt:
            raise _mismatch(path, number, f"prompt {row.index} is a different one now")
        if result.settings is None:
            raise _mismatch(path, number, "a version wrote it that did not note the settings")
        if result.settings != fingerprint(settings, row):
            raise _mismatch(path, number, "the model or the sampling options were different")
        return row.index

    return keep_answered(path, index_of)


class _Result(msgspec.Struct):
    index: int
    prompt: Any = None
    messages: Any = None
    error: str | None = None
    settings: str | None = None


def _mismatch(path: Path, number: int, reason: str) -> BadRequest:
    return BadRequest(
        f"{path}, line {number}, is not from an earlier run of this command: {reason}; "
        "name another file or use --overwrite"
    )
