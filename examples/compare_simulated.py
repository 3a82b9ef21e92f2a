"""The tables of ``asyncllm bench`` on the simulated H200, beside what was measured on a real one.

    python examples/compare_simulated.py [--profile h200-8b] [--cases bs1 c32] [--measured FILE]

Needs no GPU: all cases of one model take half a minute. The measured figures are those that the
profile keeps, of the recordings that it was fitted to; or those of another run, that ``asyncllm
bench offline --json FILE`` or ``asyncllm bench serve --json FILE`` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncllm.bench import cases
from asyncllm.bench.report import OfflineRow, OnlineRow, decode_report
from asyncllm.bench.simulated import (
    Compared,
    compare,
    measured_rows,
    offline_rows,
    online_rows,
    rows_of,
)
from asyncllm.terminal import table

UNITS = {"tok_s": "tokens/s"}


def main() -> None:
    online = cases.online()
    names = [case.name for case in cases.OFFLINE] + [case.name for case in online]
    parser = argparse.ArgumentParser(description="Compare simulated with measured figures.")
    parser.add_argument("--profile", default="h200-8b", help="h200-8b, h200-0.6b or a FILE")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--measured", action="append", help="figures to compare with", type=Path)
    args = parser.parse_args()
    measured = read(args.measured) if args.measured else measured_rows(args.profile)
    simulated: list[OfflineRow | OnlineRow] = []
    if wanted := [case for case in cases.OFFLINE if case.name in args.cases]:
        simulated += offline_rows(args.profile, wanted)
    # Those before a case shape what the scheduler knows when it begins.
    last = max((i for i, case in enumerate(online) if case.name in args.cases), default=-1)
    if last >= 0:
        rows = online_rows(args.profile, online[: last + 1])
        simulated += [row for row in rows if row.case in args.cases]
    lines = [cells(one) for one in compare(measured, simulated)]
    print(table(["case", "figure", "measured", "simulated", "ratio"], lines))


def read(files: list[Path]) -> list[OfflineRow | OnlineRow]:
    return rows_of(decode_report(file.read_bytes(), file) for file in files)


def cells(one: Compared) -> list[str]:
    name = UNITS.get(one.metric) or one.metric.replace("_", " ").removesuffix(" ms") + ", ms"
    return [one.case, name, f"{one.measured:,.2f}", f"{one.simulated:,.2f}", f"{one.ratio:.2f}"]


if __name__ == "__main__":
    main()
