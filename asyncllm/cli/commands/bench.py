"""``asyncllm bench offline | serve | fleet``: measure how fast a model is, and compare."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from asyncllm.cli import options
from asyncllm.cli.answer_file import say
from asyncllm.cli.bench_cases import (
    GivenPrompts,
    default_cases,
    fitting_cases,
    offline_cases,
    online_cases,
    read_prompts,
)
from asyncllm.cli.bench_fleet import add_fleet
from asyncllm.cli.parser import CommandParser, list_of, positive, temperature
from asyncllm.config import EngineConfig
from asyncllm.lab.bench import cases
from asyncllm.system.terminal import LoadingBar

if TYPE_CHECKING:
    from asyncllm.lab.bench.load import Target
    from asyncllm.lab.bench.report import Earlier, OnlineRow, Report

_LENGTHS: Final = {
    "input-len": "instead of the cases: tokens of each prompt (default: 512)",
    "output-len": "tokens of each answer (default: 128); with --prompts, at most",
    "num-prompts": "number of prompts",
}
#: A load process with a larger CPU share may be the bottleneck.
BUSY_CLIENT: Final = 0.7
#: With more tokens per event, the time between events is not that between tokens.
MANY_TOKENS: Final = 1.005


def configure(parser: CommandParser) -> None:
    """Add the actions of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_offline(actions)
    _add_serve(actions)
    add_fleet(actions)


def _add_offline(actions: options.Commands) -> None:
    names = ", ".join(case.name for case in cases.OFFLINE)
    parser = actions.add_parser(
        "offline",
        help="batches of prompts in this process",
        description="Measure batches whose prompts all come at the beginning. Each case runs "
        "three times on new prompts; the better of the last two runs counts. On a CPU "
        "the default is two small cases.",
    )
    _add_common(parser, names)
    parser.add_argument(
        "--temperature",
        type=temperature,
        metavar="FLOAT",
        help="temperature of all cases (default: 0.6 for offline256, 0 for the others)",
    )
    options.add_config_options(parser, EngineConfig, defaults=options.BATCH_DEFAULTS)
    parser.set_defaults(run=run_offline, parser=parser)


def _add_serve(actions: options.Commands) -> None:
    names = ", ".join(case.name for case in cases.online())
    parser = actions.add_parser(
        "serve",
        help="requests to a server, as its clients see it",
        description="Measure a server with many clients. With --url it is that server, of any "
        "kind. Otherwise a server is started with MODEL and the engine's options.",
    )
    _add_common(parser, names)
    parser.add_argument("--url", help="a server that runs already; MODEL is then its name there")
    parser.add_argument("--api-key", metavar="TEXT", help="key for that server")
    parser.add_argument(
        "--clients",
        type=list_of(positive(int)),
        metavar="LIST",
        default=[],
        help="instead of the cases: numbers of clients at once; each is a case",
    )
    parser.add_argument(
        "--rates",
        type=list_of(positive(float)),
        metavar="LIST",
        default=[],
        help="instead of the cases: requests per second, at random times; each number is a case",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="INT",
        help="another number gives other prompts, for a server that may have these in its cache",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive(int),
        metavar="INT",
        help="token ids in prompts are below this number (default: what the server says, "
        "otherwise 10001)",
    )
    options.add_config_options(parser, EngineConfig)
    parser.set_defaults(run=run_serve, parser=parser)


def _add_common(parser: argparse.ArgumentParser, names: str) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--cases", type=list_of(str), metavar="LIST", help=f"some of {names} (default: all)"
    )
    for name, text in _LENGTHS.items():
        parser.add_argument(f"--{name}", type=positive(int), metavar="INT", help=text)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="instead of the cases: prompts of your own, from a .csv with a column prompt, a "
        ".jsonl with prompt or messages, or a .txt; max_tokens and arrival (in seconds, for bench "
        "serve) may stand beside them; the model may end its answers early",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="name of the column or field that has the prompts in that file",
    )
    parser.add_argument(
        "--synthetic-acceptance",
        type=positive(float),
        metavar="FLOAT",
        help="with --load-format dummy: chance decides how many tokens of a draft are right, so "
        "that a row with the longest draft yields this many tokens on average; texts mean nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="print ratios to an earlier run (a file of --json), or to a table of other engines",
    )
    parser.add_argument(
        "--peer",
        metavar="ENGINE",
        help="compare with this engine, not with the best one in each case",
    )


# -- offline ---------------------------------------------------------------------------------------


def run_offline(args: argparse.Namespace) -> int:
    from asyncllm.lab.bench import tables
    from asyncllm.llm.load import name_of
    from asyncllm.system.event_loop import run_with_device

    config = _config(args)
    prompts = read_prompts(args)
    chosen = offline_cases(args) if prompts is None else []
    if prompts is not None and prompts.timed:
        say("offline, all prompts are there at once: their arrival is ignored")
    earlier = _prepare(args, name_of(config.model))
    report = run_with_device(_measure_offline(args, config, chosen, prompts))
    print(tables.whole(report, earlier))
    return 0 if report.offline else 1


async def _measure_offline(
    args: argparse.Namespace,
    config: EngineConfig,
    chosen: list[cases.OfflineCase] | None,
    prompts: GivenPrompts | None,
) -> Report:
    import asyncio

    from asyncllm.lab.bench.offline import SETTLE_SECONDS, report_of, run_case
    from asyncllm.llm.async_llm import AsyncLLM

    started = time.perf_counter()
    async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
        report = report_of(llm, time.perf_counter() - started)
        if llm.limits.device == "cuda":
            await asyncio.sleep(SETTLE_SECONDS)
        if prompts is not None:
            chosen = [await prompts.offline_case(llm)]
        if chosen is None:
            chosen = default_cases(llm.limits.device)
        for case in chosen:
            if args.temperature is not None:
                case = msgspec.structs.replace(case, temperature=args.temperature)
            row = await run_case(llm, case)
            if row is None:
                say(f"{case.name}: skipped, the context is too short for it")
                continue
            say(f"{case.name}: {row.tok_s:,.1f} tok/s")
            report.offline.append(row)
            _write(args, report)
    return report


# -- serve -----------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    if args.url and args.synthetic_acceptance is not None:
        options.usage_error(args, "--synthetic-acceptance: the server at --url decides")
    config = _config(args)
    if args.url:
        options.refuse_engine_options(args)
    chosen = online_cases(args)

    from asyncllm.lab.bench import server, tables
    from asyncllm.lab.bench.load import Target
    from asyncllm.lab.bench.report import Report, describe
    from asyncllm.llm.client.request_fields import changed_fields
    from asyncllm.llm.load import name_of

    with ExitStack() as stack:
        if args.url:
            model = server.find_model(args.url, args.api_key, config.model)
            earlier = _prepare(args, model.name)
            report = Report(machine=f"the server at {model.url}", model=model.name)
        else:
            earlier = _prepare(args, name_of(config.model))
            process = stack.enter_context(server.ServerProcess(config))
            model = server.find_model(process.url)
            report = Report(
                machine=describe(process.device),
                model=model.name,
                settings={k: v for k, v in changed_fields(config).items() if k != "model"},
                start_s=process.start_s,
            )
        # Other engines do not tell; few vocabularies are smaller than the largest id of the cases.
        vocab_size = args.vocab_size or model.vocab_size or cases.LARGEST_ID + 1
        target = Target(model.url, model.name, vocab_size, args.api_key if args.url else None)
        _measure_server(args, fitting_cases(chosen, model.max_model_len), target, report)
    print(tables.whole(report, earlier))
    return 0 if report.online and not any(row.failed for row in report.online) else 1


def _measure_server(
    args: argparse.Namespace, chosen: list[cases.OnlineCase], target: Target, report: Report
) -> None:
    from asyncllm.lab.bench.online import run_cases

    for row in run_cases(target, chosen, args.seed):
        say(f"{row.case}: {row.tok_s:,.1f} tok/s")
        _warn(row)
        report.online.append(row)
        _write(args, report)


def _warn(row: OnlineRow) -> None:
    """Say what limits the meaning of the figures."""
    if row.client_busy > BUSY_CLIENT:
        say(f"{row.case}: the clients were {row.client_busy:.0%} busy, and may be what limits")
    if (row.tokens_per_event or 0) > MANY_TOKENS:
        say(
            f"{row.case}: {row.tokens_per_event:.2f} tokens per event, as some share one or have "
            "no text; ITL is the time between events"
        )


# -- both ------------------------------------------------------------------------------------------


def _config(args: argparse.Namespace) -> EngineConfig:
    """The engine's options, those of ``--synthetic-acceptance`` included."""
    if args.synthetic_acceptance is not None:
        given = vars(args).get("speculative_config") or {}
        args.speculative_config = {**given, "synthetic_acceptance": args.synthetic_acceptance}
    return options.config_from_args(args, EngineConfig)


def _prepare(args: argparse.Namespace, model: str) -> Earlier | None:
    """Before measuring: read the figures to compare with, and check that --json can be written.

    Raises:
        BadRequest, OSError: one of the files is wrong.
    """
    from asyncllm.lab.bench.report import Earlier

    if args.peer is not None and args.compare is None:
        options.usage_error(args, "--peer is one of those in the file of --compare")
    if args.json is not None:
        args.json.touch()
    if args.compare is None:
        return None
    return Earlier.read(args.compare).select(model, args.peer)


def _write(args: argparse.Namespace, report: Report) -> None:
    """Write the file after each case, so that a later failure loses nothing."""
    if args.json is not None:
        report.write(args.json)
