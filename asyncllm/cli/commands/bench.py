"""``asyncllm bench offline | serve``: how fast a model is, and compared with what."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from asyncllm.bench import cases, own
from asyncllm.cli.options import (
    BATCH_DEFAULTS,
    add_config_options,
    add_model,
    config_from_args,
    refuse_engine_options,
    usage_error,
)
from asyncllm.cli.progress import LoadingBar
from asyncllm.cli.values import list_of, positive
from asyncllm.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.bench.earlier import Earlier
    from asyncllm.bench.report import Report
    from asyncllm.bench.subject import Subject
    from asyncllm.cli.options import Commands

_OWN: Final = {
    "input-len": "instead of the cases: prompts of so many tokens (default: 512)",
    "output-len": "answers of so many tokens (default: 128); with --prompts, at most",
    "num-prompts": "how many of them",
}
#: Tokens of prompts and of answers, where only one of them is given.
LENGTHS: Final = (512, own.MAX_TOKENS)

C = TypeVar("C", cases.OfflineCase, cases.OnlineCase)
T = TypeVar("T")

#: A process that makes load and is busy for a larger share of the time may be what limits.
BUSY_CLIENT = 0.7
#: Of an event: the time between events is then not that between tokens.
MANY_TOKENS = 1.005


def add_command(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure how fast a model is", allow_abbrev=False)
    actions = bench.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_offline(actions)
    _add_serve(actions)


def _add_offline(actions: Commands) -> None:
    names = ", ".join(case.name for case in cases.OFFLINE)
    parser = actions.add_parser(
        "offline",
        help="batches of prompts in this process",
        description="Measure batches of prompts that are all there at the beginning. Each case "
        "runs three times on fresh prompts, the better of the last two counts.",
        allow_abbrev=False,
    )
    _add_common(parser, names)
    add_config_options(parser, EngineConfig, defaults=BATCH_DEFAULTS)
    parser.set_defaults(run=run_offline, parser=parser)


def _add_serve(actions: Commands) -> None:
    names = ", ".join(case.name for case in cases.online())
    parser = actions.add_parser(
        "serve",
        help="requests to a server, as its clients see it",
        description="Measure a server with many clients: one that is started for it, with MODEL "
        "and the engine's options, or the one at --url, whatever software it runs.",
        allow_abbrev=False,
    )
    _add_common(parser, names)
    parser.add_argument("--url", help="a server that runs already; MODEL is then its name there")
    parser.add_argument("--api-key", metavar="TEXT", help="key for that server")
    parser.add_argument(
        "--clients",
        type=list_of(positive(int)),
        metavar="LIST",
        default=[],
        help="instead of the cases: so many clients at once, for each number in the list",
    )
    parser.add_argument(
        "--rates",
        type=list_of(positive(float)),
        metavar="LIST",
        default=[],
        help="instead of the cases: so many requests per second, at random times",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw latency against load (.png, .svg, .pdf); needs the extra 'bench'",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="INT",
        help="another number makes other prompts, for a server that may have cached these",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive(int),
        metavar="INT",
        help="ids in prompts stay below this (default: what the server says, else 10001)",
    )
    add_config_options(parser, EngineConfig)
    parser.set_defaults(run=run_serve, parser=parser)


def _add_common(parser: argparse.ArgumentParser, names: str) -> None:
    add_model(parser)
    parser.add_argument(
        "--cases", type=list_of(str), metavar="LIST", help=f"some of {names} (default: all)"
    )
    for name, text in _OWN.items():
        parser.add_argument(f"--{name}", type=positive(int), metavar="INT", help=text)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="instead of the cases: prompts of your own, from a .csv with a column prompt, a "
        ".jsonl with prompt or messages, or a .txt; max_tokens and arrival (in seconds, for bench "
        "serve) may stand beside them; the model may end its answers early",
    )
    parser.add_argument("--column", metavar="NAME", help="what the prompts are called in that file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="print the ratio to what --json wrote earlier, or to a table of other engines",
    )
    parser.add_argument(
        "--peer", metavar="ENGINE", help="compare with this one, not the best in each case"
    )


# -- offline ---------------------------------------------------------------------------------------


def run_offline(args: argparse.Namespace) -> int:
    config = config_from_args(args, EngineConfig)
    asked = _read_prompts(args)
    chosen: list[cases.OfflineCase] = []
    if asked is None:
        lengths, count = _own_lengths(args), args.num_prompts
        if lengths or count:
            chosen = [cases.own_offline(*(lengths or LENGTHS), count or own.CLIENTS)]
        else:
            chosen = _chosen(args, cases.OFFLINE)
    elif any(one.at is not None for one in asked):
        _say("offline, all prompts are there at once: their arrival is ignored")

    from asyncllm.bench import tables
    from asyncllm.event_loop import new_event_loop
    from asyncllm.llm.load import name_of

    earlier = _prepare(args, name_of(config.model))
    # The thread that drives the device must get the GIL back at once; the default is 5 ms.
    sys.setswitchinterval(1e-4)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        report = runner.run(_run_offline(args, config, chosen, asked))
    print(tables.whole(report, earlier))
    return 0 if report.offline else 1


async def _run_offline(
    args: argparse.Namespace,
    config: EngineConfig,
    chosen: list[cases.OfflineCase],
    asked: list[own.Asked] | None,
) -> Report:
    from asyncllm.bench.offline import run_case
    from asyncllm.bench.subject import of_llm
    from asyncllm.llm.async_llm import AsyncLLM

    started = time.perf_counter()
    async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
        report = of_llm(llm, time.perf_counter() - started)
        if asked is not None:
            chosen = [await own.offline_case(llm, args.prompts, asked)]
        for case in chosen:
            row = await run_case(llm, case)
            if row is None:
                _say(f"{case.name}: skipped, the context is too short for it")
                continue
            _say(f"{case.name}: {row.tok_s:,.1f} tok/s")
            report.offline.append(row)
            _write(args, report)
    return report


# -- serve -----------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    config = config_from_args(args, EngineConfig)
    if args.url:
        refuse_engine_options(args)
    chosen = _online_cases(args)

    from asyncllm.bench import plot, tables
    from asyncllm.bench.subject import of_process, of_url
    from asyncllm.llm.load import name_of

    if args.plot is not None:
        plot.check(args.plot, chosen)
    with ExitStack() as stack:
        if args.url:
            subject = of_url(args.url, args.api_key, config.model, args.vocab_size)
            earlier = _prepare(args, subject.target.model)
        else:
            earlier = _prepare(args, name_of(config.model))
            subject = stack.enter_context(of_process(config, args.vocab_size))
        report = subject.report
        _run_online(args, chosen, subject)
    print(tables.whole(report, earlier))
    if args.plot is not None:
        plot.draw(args.plot, report, earlier.online if earlier else ())
    return 0 if report.online and not any(row.failed for row in report.online) else 1


def _online_cases(args: argparse.Namespace) -> list[cases.OnlineCase]:
    """The cases that were named, or those of the loads, lengths or prompts that were."""
    asked, lengths = _read_prompts(args), _own_lengths(args)
    if asked is not None:
        return own.online_cases(asked, args.clients, args.rates)
    if not (args.clients or args.rates or lengths or args.num_prompts):
        return _chosen(args, cases.online(args.seed))
    if args.cases:
        usage_error(args, "--cases are not run beside --clients or --rates")
    num_in, num_out = cases.PROMPT_TOKENS, cases.OUTPUT_TOKENS
    if lengths:
        num_in, num_out = ((n, n) for n in lengths)
    clients = args.clients or ([] if args.rates else [own.CLIENTS])
    swept = cases.sweep(clients, args.rates, args.seed, num_in, num_out, args.num_prompts)
    return list(swept)


def _run_online(
    args: argparse.Namespace, chosen: Iterable[cases.OnlineCase], subject: Subject
) -> None:
    from asyncllm.bench.online import run_cases

    fitting = []
    for case in chosen:
        if subject.max_model_len is None or case.longest <= subject.max_model_len:
            fitting.append(case)
        else:
            _say(f"{case.name}: skipped, the context is too short for it")
    for row in run_cases(subject.target, fitting, args.seed):
        _say(f"{row.case}: {row.tok_s:,.1f} tok/s")
        if row.client_busy > BUSY_CLIENT:
            _say(f"{row.case}: the clients were {row.client_busy:.0%} busy, and may be what limits")
        if (row.tokens_per_event or 0) > MANY_TOKENS:
            _say(
                f"{row.case}: {row.tokens_per_event:.2f} tokens per event, as some share one or "
                "have no text; ITL is the time between events"
            )
        subject.report.online.append(row)
        _write(args, subject.report)


# -- both ------------------------------------------------------------------------------------------


def _own_lengths(args: argparse.Namespace) -> tuple[int, int] | None:
    """Tokens of prompts and answers, if they are not those of the cases."""
    if args.cases and (args.input_len or args.output_len or args.num_prompts):
        usage_error(args, "--cases have lengths and numbers of prompts of their own")
    if not (args.input_len or args.output_len):
        return None
    return args.input_len or LENGTHS[0], args.output_len or LENGTHS[1]


def _read_prompts(args: argparse.Namespace) -> list[own.Asked] | None:
    """The prompts of the file, if one was named.

    Raises:
        BadRequest, OSError: it is not such a file; the message has the line.
    """
    if args.prompts is None:
        if args.column is not None:
            usage_error(args, "--column is one of the file of --prompts")
        return None
    if args.cases or args.input_len:
        usage_error(args, "--prompts are run instead of --cases, and have their own --input-len")
    from asyncllm.cli.prompts import read_rows

    rows = read_rows(args.prompts, args.column)[: args.num_prompts]
    return own.read_asked(args.prompts, rows, args.output_len)


def _chosen(args: argparse.Namespace, known: Iterable[C]) -> list[C]:
    """The cases that were named, in that order, or all."""
    by_name = {case.name: case for case in known}
    names = args.cases or list(by_name)
    for name in names:
        if name not in by_name:
            usage_error(args, f"no case {name!r} among {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _prepare(args: argparse.Namespace, model: str) -> Earlier | None:
    """Before anything is measured: what to compare with, and can the figures be written?

    Raises:
        BadRequest, OSError: no.
    """
    from asyncllm.bench.earlier import Earlier

    if args.peer is not None and args.compare is None:
        usage_error(args, "--peer is one of those in the file of --compare")
    if args.json is not None:
        args.json.touch()
    if args.compare is None:
        return None
    return Earlier.read(args.compare).select(model, args.peer)


def _write(args: argparse.Namespace, report: Report) -> None:
    """After each case: what was measured is not lost if the next one fails."""
    if args.json is not None:
        report.write(args.json)


def _say(message: str) -> None:
    print(message, file=sys.stderr)
