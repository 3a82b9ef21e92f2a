"""``asyncllm bench fleet``: many replicas in simulated time, on chats of several turns."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from asyncllm.cli.options import Commands, usage_error
from asyncllm.cli.parser import list_of, positive, span

if TYPE_CHECKING:
    from asyncllm.lab.planning.chats import ChatLoad
    from asyncllm.lab.planning.fleet import Fleet, FleetFigures

ROUTINGS: Final = ("affinity", "least", "random")
PROFILES: Final = ("h200-8b", "h200-0.6b", "h200-30b-a3b")
_NUMBERS: Final = (
    ("replicas", 8, "replicas"),
    ("rate", 0.4, "chats that begin in a second, for each replica"),
    ("seconds", 60.0, "how long new chats begin; all of them are served to their end"),
    ("system", 1000, "tokens of the system prompts, of which there are four"),
    ("think", 10.0, "mean seconds until a user's next message"),
    ("restart-seconds", 15.0, "seconds until a dead replica serves again"),
)
_SPANS: Final = (
    ("turns", "2-8", "turns of a chat"),
    ("user", "50-400", "tokens of a user's message"),
    ("answer", "50-200", "tokens of an answer"),
)
_HEAD: Final = (
    *("", "found %", "of one", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s", "busiest"),
    *("waiting", "moved", "broken"),
)
_LEGEND: Final = (
    "found: prompt tokens found in the caches; of one: as a share of what one replica finds that "
    "serves its part of the chats; busiest: tokens that the busiest replica computed, to the mean; "
    "waiting: the same of the requests that it had at a time; moved: requests that went to another "
    "replica when theirs died; broken: answers that broke off, whose clients asked again. Times in "
    "ms."
)


def add_fleet(actions: Commands) -> None:
    parser = actions.add_parser(
        "fleet",
        help="many replicas in simulated time",
        description="Serve chats of several turns with many replicas, in simulated time: the "
        "schedulers and caches are real, and so is the routing of serve --dp. Step times are those "
        "measured on one H200. Needs no GPU.",
    )
    add = parser.add_argument
    add(
        "--sim-profile",
        choices=PROFILES,
        default=PROFILES[0],
        help="step times, and the model that has them (default: h200-8b)",
    )
    for name, default, text in _NUMBERS:
        kind = type(default)
        add(
            f"--{name}",
            type=positive(kind),
            default=default,
            metavar=kind.__name__.upper(),
            help=f"{text} (default: {default:g})",
        )
    for name, span_text, text in _SPANS:
        help_text = f"{text} (default: {span_text})"
        add(f"--{name}", type=span, default=span(span_text), metavar="N-M", help=help_text)
    add(
        "--kill-every",
        type=positive(float),
        metavar="FLOAT",
        help="a replica dies every so many seconds; by default none dies",
    )
    add(
        "--routing",
        type=list_of(str),
        default=list(ROUTINGS),
        metavar="LIST",
        help="affinity routes as serve --dp does; least work and random are for comparison "
        "(default: all three)",
    )
    add("--seed", type=int, default=0, metavar="INT", help="another number makes other chats")
    add("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run_fleet, parser=parser)


def run_fleet(args: argparse.Namespace) -> int:
    unknown = [name for name in args.routing if name not in ROUTINGS]
    if unknown:
        usage_error(args, f"--routing: {unknown[0]!r} is none of {', '.join(ROUTINGS)}")

    import msgspec

    from asyncllm.system.terminal import progress_bar

    fleet, load = _fleet(args)
    deaths = []
    if args.kill_every is not None:
        count = int(load.seconds / args.kill_every)
        deaths = [(args.kill_every * (i + 1), i % args.replicas) for i in range(count)]
    found: dict[str, FleetFigures] = {}
    for name in args.routing:
        own = msgspec.structs.replace(fleet, routing=name)
        with progress_bar(name, load.num_turns, "turns", transient=True) as show:
            found[name] = own.serve(load, deaths, lambda ended: show(ended, ""))
    one = msgspec.structs.replace(fleet, replicas=1).serve(load.share(args.replicas))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({**found, "one": one})).decode())
    else:
        print(_report(args, found, one))
    return 0


def _fleet(args: argparse.Namespace) -> tuple[Fleet, ChatLoad]:
    from asyncllm import demo
    from asyncllm.config import EngineConfig
    from asyncllm.executor.sim.executor import resolve_sim
    from asyncllm.lab.planning.chats import ChatLoad
    from asyncllm.lab.planning.fleet import Fleet
    from asyncllm.models.spec import read_spec

    config = EngineConfig(device="sim", sim_profile=args.sim_profile)
    limits, cost = resolve_sim(config, read_spec(demo.path()))
    assert cost.profile is not None
    given = {name: getattr(args, name) for name in ChatLoad.__struct_fields__ if name in args}
    load = ChatLoad(**{**given, "rate": args.rate * args.replicas})
    if load.longest > limits.max_model_len:
        usage_error(
            args,
            f"a chat may come to {load.longest:,} tokens, and the context is of "
            f"{limits.max_model_len:,}",
        )
    fleet = Fleet(
        replicas=args.replicas,
        limits=limits,
        cost=cost,
        host=cost.profile.host,
        restart_seconds=args.restart_seconds,
    )
    return fleet, load


def _report(args: argparse.Namespace, found: dict[str, FleetFigures], one: FleetFigures) -> str:
    from asyncllm.system.terminal import table

    first = next(iter(found.values()))
    title = (
        f"{args.replicas} replicas ({args.sim_profile}), {first.chats:,} chats, "
        f"{first.requests:,} requests, {first.deaths} deaths; a cache without end would find "
        f"{100 * first.findable:.1f} %:"
    )
    rows = [_row(name, figures, one) for name, figures in found.items()]
    rows.append(_row("one replica", one, one))
    return "\n".join((title, table(_HEAD, rows, _LEGEND)))


def _row(name: str, figures: FleetFigures, one: FleetFigures) -> list[str]:
    times = (figures.ttft_p50, figures.ttft_p99, figures.itl_p50, figures.itl_p99)
    return [
        name,
        f"{100 * figures.found:.1f}",
        f"{100 * figures.found / one.found:.1f} %" if one.found else "-",
        *("-" if seconds is None else f"{1e3 * seconds:,.1f}" for seconds in times),
        f"{figures.tokens_per_second:,.0f}",
        f"{figures.token_imbalance:.2f}",
        f"{figures.request_imbalance:.2f}",
        f"{figures.moved:,}",
        f"{figures.broken:,}",
    ]
