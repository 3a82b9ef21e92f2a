"""The cases of ``asyncllm bench`` that its options choose."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from asyncllm.cli.answer_file import say
from asyncllm.cli.options import usage_error
from asyncllm.cli.prompts import Row, read_rows
from asyncllm.errors import BadRequest
from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import OfflineCase, OnlineCase, Shot, Work

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

#: Tokens of prompts and of answers by default.
LENGTHS: Final = (512, 128)

C = TypeVar("C", cases.OfflineCase, cases.OnlineCase)


def read_prompts(args: argparse.Namespace) -> GivenPrompts | None:
    """The prompts of the file of --prompts, if it is given.

    Raises:
        BadRequest, OSError: the file is wrong; the message has the line.
    """
    if args.prompts is None:
        if args.column is not None:
            usage_error(args, "--column is one of the file of --prompts")
        return None
    if args.cases or args.input_len:
        usage_error(args, "--prompts are run instead of --cases, and have their own --input-len")
    max_tokens = args.output_len or LENGTHS[1]
    return GivenPrompts(args.prompts, args.column, args.num_prompts, max_tokens)


def offline_cases(args: argparse.Namespace) -> list[cases.OfflineCase] | None:
    """The cases that the options name; None if that depends on the device."""
    lengths = _given_lengths(args)
    if lengths or args.num_prompts:
        return [cases.own_offline(*(lengths or LENGTHS), args.num_prompts or CLIENTS)]
    return _named(args, cases.OFFLINE) if args.cases else None


def default_cases(device: str) -> list[cases.OfflineCase]:
    """The offline cases of a device, if the options name none."""
    if device != "cpu":
        return list(cases.OFFLINE)
    names = ",".join(case.name for case in cases.OFFLINE)
    say(f"on a CPU, two small cases are run; for all: --cases {names}")
    return list(cases.OFFLINE_CPU)


def online_cases(args: argparse.Namespace) -> list[cases.OnlineCase]:
    """The cases that are named, or those of the given loads, lengths or prompts."""
    prompts, lengths = read_prompts(args), _given_lengths(args)
    if prompts is not None:
        return prompts.online_cases(args.clients, args.rates)
    if not (args.clients or args.rates or lengths or args.num_prompts):
        return _named(args, cases.online(args.seed))
    if args.cases:
        usage_error(args, "--cases are not run beside --clients or --rates")
    num_in, num_out = cases.PROMPT_TOKENS, cases.OUTPUT_TOKENS
    if lengths:
        num_in, num_out = ((n, n) for n in lengths)
    clients = args.clients or ([] if args.rates else [CLIENTS])
    swept = cases.sweep(clients, args.rates, args.seed, num_in, num_out, args.num_prompts)
    return list(swept)


def fitting_cases(
    chosen: Iterable[cases.OnlineCase], max_model_len: int | None
) -> list[cases.OnlineCase]:
    """The cases that fit the context, as far as the server tells its length."""
    fitting = []
    for case in chosen:
        if max_model_len is None or case.longest <= max_model_len:
            fitting.append(case)
        else:
            say(f"{case.name}: skipped, the context is too short for it")
    return fitting


def _given_lengths(args: argparse.Namespace) -> tuple[int, int] | None:
    """Tokens of prompts and answers, if the options say so."""
    if args.cases and (args.input_len or args.output_len or args.num_prompts):
        usage_error(args, "--cases have lengths and numbers of prompts of their own")
    if not (args.input_len or args.output_len):
        return None
    return args.input_len or LENGTHS[0], args.output_len or LENGTHS[1]


def _named(args: argparse.Namespace, known: Iterable[C]) -> list[C]:
    """The cases of --cases, in that order, or all."""
    by_name = {case.name: case for case in known}
    names = args.cases or list(by_name)
    for name in names:
        if name not in by_name:
            usage_error(args, f"no case {name!r} among {', '.join(by_name)}")
    return [by_name[name] for name in names]


CLIENTS: Final = 8


class GivenPrompts:
    """The first prompts of a file, with its columns max_tokens and arrival (in seconds).

    Attributes:
        timed: the prompts have arrivals.
    """

    def __init__(self, path: Path, column: str | None, count: int | None, max_tokens: int):
        """``max_tokens`` is for prompts without one.

        Raises:
            BadRequest: a value is wrong, or only some prompts have an arrival.
            OSError: the file cannot be read.
        """
        self._path = path
        self._rows: list[tuple[Row, int, float | None]] = []
        for row in read_rows(path, column)[:count]:
            with self._named():
                if not row.prompt:
                    raise BadRequest(f"line {row.line}: the prompt is empty")
                self._rows.append((row, row.max_tokens or max_tokens, row.number("arrival")))
        untimed = [row.line for row, _, at in self._rows if at is None]
        self.timed = not untimed
        if 0 < len(untimed) < len(self._rows):
            raise BadRequest(f"{path}: line {untimed[0]}: no arrival, which other prompts have")

    async def offline_case(self, llm: AsyncLLM) -> OfflineCase:
        """All prompts at once; answers end when the model ends them, or at their max_tokens.

        Raises:
            BadRequest: a prompt does not fit the context; the message has the line.
        """
        prompts = []
        for row, max_tokens, _ in self._rows:
            with self._named(f"line {row.line}: "):
                ids = await llm.encode_prompt(row.prompt)
                if len(ids) + max_tokens > llm.limits.max_model_len:
                    raise BadRequest(
                        f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the context "
                        f"of {llm.limits.max_model_len}"
                    )
                prompts.append(ids)
        work = Work(prompts, [count for _, count, _ in self._rows], ignore_eos=False)
        return OfflineCase("prompts", lambda _repetition: work)

    def online_cases(self, clients: Sequence[int], rates: Sequence[float]) -> list[OnlineCase]:
        """The prompts under each load; without loads at their own arrivals, or from 8 clients."""
        # Only the server can count the tokens of a text.
        shots = tuple(
            Shot(at, 0, count, seed=0, given=cast("str | list[Any]", row.prompt))
            for row, count, at in self._rows
        )
        if self.timed and not clients and not rates:
            return [OnlineCase("prompts", shots)]
        untimed = tuple(shot._replace(at=None) for shot in shots)
        if not clients and not rates:
            clients = [CLIENTS]
        found = [OnlineCase(f"{n} clients", untimed, clients=n) for n in clients]
        for rate in rates:
            draw, at, timed = random.Random(9), 0.0, []
            for shot in shots:
                timed.append(shot._replace(at=at))
                at += draw.expovariate(rate)
            found.append(OnlineCase(f"{rate:g}/s", tuple(timed), rate=rate))
        return found

    @contextmanager
    def _named(self, line: str = "") -> Iterator[None]:
        """Errors begin with the file."""
        try:
            yield
        except BadRequest as error:
            raise BadRequest(f"{self._path}: {line}{error.message}") from None
