"""``asyncllm replay``: check traces, simulate one with other settings, or calibrate with them."""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncllm.lab.replay.variant import KEYS, Variant

if TYPE_CHECKING:
    from asyncllm.lab.bench.report import Report
    from asyncllm.lab.replay.calibrate import Error
    from asyncllm.lab.replay.figures import Figures
    from asyncllm.lab.replay.steps import RecordedStep
    from asyncllm.lab.replay.verify import Replayed


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the scheduler again on a recording of serve --trace, and check that it makes the "
        "same plans."
    )
    parser.add_argument(
        "files", metavar="TRACE", nargs="+", help="the trace; with --calibrate there may be several"
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        type=_variant,
        metavar="KEY=VALUE",
        help="simulate the same requests with other settings, and compare; separate several "
        "changes by commas; may be repeated. Keys: " + ", ".join(KEYS),
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="write a profile of the simulated device to this file, made from the step times of "
        "all traces, and print how well it fits; use it with --sim-profile",
    )
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="with --calibrate: the file that asyncllm bench --json wrote during the recording; "
        "it has the times of the event loop and of HTTP, and is kept in the profile",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from asyncllm.lab.replay.simulate import simulate

    if args.what_if and len(args.files) > 1:
        args.parser.error("--what-if takes one trace")
    if args.measured and args.calibrate is None:
        args.parser.error("--measured is for --calibrate")
    if args.calibrate is not None and not Path(args.calibrate).parent.is_dir():
        args.parser.error(f"--calibrate: there is no folder {Path(args.calibrate).parent}")
    reports = [_report(file) for file in args.measured]  # first: a replay takes long
    replays: list[Replayed] = []
    traces: list[list[RecordedStep]] = []
    for file in args.files:
        steps: list[RecordedStep] = []
        verified = _verified(file, steps.append if args.calibrate is not None else None)
        if verified is None:
            return 1
        replays.append(verified)
        traces.append(steps)
    if args.calibrate is not None:
        print()
        print(_calibrated(replays, traces, reports, args.calibrate))
    if args.what_if:
        (replayed,) = replays
        columns = [("recorded", replayed.figures), ("simulated", simulate(replayed))]
        columns += [(variant.name, simulate(replayed, variant)) for variant in args.what_if]
        print()
        print(_table(columns))
    return 0


def _report(file: str) -> Report:
    from asyncllm.lab.bench.report import decode_report

    return decode_report(Path(file).read_bytes(), Path(file))


def _verified(file: str, watch: Callable[[RecordedStep], None] | None) -> Replayed | None:
    """Replay a trace, and say how that went; None if the plans differ."""
    from asyncllm.engine.recording.trace_file import Trace
    from asyncllm.lab.replay.verify import checksum_note, verify, version_note

    trace = Trace.read(file)
    for note in (version_note(trace), checksum_note(trace)):
        if note is not None:
            print(note, file=sys.stderr)
    replayed = verify(trace, watch=watch)
    print(_summary(replayed))
    found = replayed.mismatch
    if found is None:
        return replayed
    print(
        f"asyncllm: error: step {found.step}, at {found.now:.6f} s, is not planned as it was; "
        f"what differs: {found.what}",
        file=sys.stderr,
    )
    return None


def _calibrated(
    replays: list[Replayed], traces: list[list[RecordedStep]], reports: list[Report], file: str
) -> str:
    """Write the profile; returns the table of its errors."""
    from asyncllm.lab.replay.calibrate import calibrate
    from asyncllm.lab.replay.calibrate_host import host_times, kept
    from asyncllm.system.terminal import table

    header = replays[0].trace.header
    machine = reports[0].machine if reports else header.limits.device
    profile, errors = calibrate(
        traces,
        header.limits,
        f"{machine}, {header.limits.dtype}, asyncllm {header.asyncllm}",
        host_times([replayed.trace for replayed in replays], traces, reports),
        [kept(report) for report in reports],
    )
    profile.write(Path(file))
    return table(["shape", "steps", "bias", "median", "p90"], [_error_row(e) for e in errors])


def _error_row(error: Error) -> list[str]:
    shares = [f"{100 * share:.1f}%" for share in (error.bias, error.median, error.p90)]
    return [error.kind, f"{error.steps:,}", *shares]


def _variant(text: str) -> Variant:
    try:
        return Variant.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _summary(replayed: Replayed) -> str:
    figures, workload = replayed.figures, replayed.workload
    header = replayed.trace.header
    ended, same = workload.ended, "all plans are the same"
    if ended is None:
        ended, same = (
            "it was cut off, or is still being written",
            "all plans until then are the same",
        )
        if replayed.trace.num_lost:
            ended += f" (without its last {replayed.trace.num_lost} bytes, which are incomplete)"
    if replayed.mismatch is not None:
        same = "plans differ"
    rate = figures.num_steps / replayed.seconds if replayed.seconds else 0.0
    return "\n".join(
        (
            f"{replayed.trace.path}: asyncllm {header.asyncllm}, policy {header.policy}",
            f"{figures.num_requests} requests, {figures.num_steps} steps, {figures.num_tokens} "
            f"tokens generated in {figures.makespan:.1f} s; end of the trace: {ended}",
            f"replayed in {replayed.seconds:.2f} s, {rate:.0f} steps a second: {same}",
        )
    )


def _table(columns: list[tuple[str, Figures]]) -> str:
    """A row for each figure, a column for each run."""
    from asyncllm.system.terminal import table

    cells = [_cells(figures) for _, figures in columns]
    rows = [[name, *(column[name] for column in cells)] for name in cells[0]]
    return table(["", *(name for name, _ in columns)], rows)


def _cells(figures: Figures) -> dict[str, str]:
    return {
        "TTFT p50, ms": _ms(figures.ttft, 50),
        "TTFT p90, ms": _ms(figures.ttft, 90),
        "TTFT p99, ms": _ms(figures.ttft, 99),
        "ITL p50, ms": _ms(figures.itl, 50),
        "ITL p99, ms": _ms(figures.itl, 99),
        "queue wait p99, ms": _ms(figures.queue_wait, 99),
        "generated tokens/s": f"{figures.throughput:.1f}",
        "tokens of a row with a draft": _count(figures.tokens_per_draft),
        "preemptions": str(figures.num_preemptions),
        "prompt tokens cached": f"{100 * figures.cached_share:.1f} %",
        "makespan, s": f"{figures.makespan:.2f}",
    }


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(values: array[float], percent: float) -> str:
    from asyncllm.lab.replay.figures import percentile

    value = percentile(values, percent)
    return "-" if value is None else f"{value * 1e3:.1f}"
