"""The tables of ``asyncllm bench`` on the simulated H200, beside what was measured on a real one.

    python -m tools.compare_simulated [--profile h200-8b] [--cases bs1 c32] [--measured FILE]

Needs no GPU: all cases of one model take half a minute. Engine, scheduler and cache are the real
ones, on a virtual clock. Clients are in this process: what HTTP takes is one of the measured times
of the profile. The measured figures are those that the profile keeps, of the recordings that it was
fitted to; or those of another run, that ``asyncllm bench offline --json FILE`` or ``asyncllm bench
serve --json FILE`` wrote.
"""

from __future__ import annotations

import argparse
import asyncio
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from asyncllm import AsyncLLM
from asyncllm.errors import AsyncLLMError, BadRequest
from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.profile import HostTimes, find_profile
from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import OfflineCase, OnlineCase, Shot, warm_up
from asyncllm.lab.bench.load import Answered, Outcome
from asyncllm.lab.bench.offline import run_case
from asyncllm.lab.bench.online import summarize
from asyncllm.lab.bench.report import OfflineRow, OnlineRow, Report, decode_report
from asyncllm.system.terminal import table
from asyncllm.types import SamplingParams, TokenDelta

UNITS: Final = {"tok_s": "tokens/s"}
#: Longest sequence of the online cases.
CONTEXT: Final = 10_000
#: The first repetition of an offline case warms up.
REPETITIONS: Final = 2
#: The metrics that are compared; ``itl_max`` is one event of a whole case.
METRICS: Final = (
    *("tok_s", "ttft_ms", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99"),
    *("long_ttft_p50", "long_ttft_p99"),
)
#: A shorter time in ms is none: the events of several tokens come together.
LEAST_MS: Final = 0.1


class Compared(NamedTuple):
    """One figure of a case; ``ratio`` of simulated to measured."""

    case: str
    metric: str
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


def measured_rows(profile: str) -> list[OfflineRow | OnlineRow]:
    """The rows that a profile keeps.

    Raises:
        BadRequest: it has none.
        ModelError: see ``find_profile``.
    """
    found = find_profile(profile)
    reports = [] if found is None else [msgspec.convert(raw, Report) for raw in found.measured]
    rows = rows_of(reports)
    if not rows:
        raise BadRequest(f"the profile {profile} has no measured rows to compare with")
    return rows


def rows_of(reports: Iterable[Report]) -> list[OfflineRow | OnlineRow]:
    rows: list[OfflineRow | OnlineRow] = []
    for report in reports:
        rows += report.offline
        rows += report.online
    return rows


def compare(
    measured: Sequence[OfflineRow | OnlineRow], simulated: Sequence[OfflineRow | OnlineRow]
) -> list[Compared]:
    """The figures of the cases that are in both."""
    others = {(type(row), row.case): row for row in measured}
    found = []
    for row in simulated:
        other = others.get((type(row), row.case))
        for metric in METRICS:
            ours, theirs = getattr(row, metric, None), getattr(other, metric, None)
            if ours is not None and theirs is not None and theirs > LEAST_MS:
                found.append(Compared(row.case, metric, theirs, ours))
    return found


def offline_rows(
    profile: str, cases: Sequence[OfflineCase], model: str | None = None
) -> list[OfflineRow]:
    """The rows of ``asyncllm bench offline``, simulated.

    Args:
        model: that the profile is of, if it does not come with asyncllm.
    """

    async def main() -> list[OfflineRow]:
        clock = asyncio.get_running_loop().time
        options: dict[str, Any] = {"policy": "longest", "itl_target_ms": 0.0}
        async with AsyncLLM(model, device="sim", sim_profile=profile, **options) as llm:
            rows = [await run_case(llm, case, REPETITIONS, clock) for case in cases]
        return [row for row in rows if row is not None]

    return virtual_time.run(main())


def online_rows(
    profile: str, cases: Sequence[OnlineCase], model: str | None = None
) -> list[OnlineRow]:
    """The rows of ``asyncllm bench serve``, simulated; ``model`` as for ``offline_rows``."""
    found = find_profile(profile)

    async def main() -> list[OnlineRow]:
        options: dict[str, Any] = {"max_model_len": CONTEXT}
        async with AsyncLLM(model, device="sim", sim_profile=profile, **options) as llm:
            load = _Load(llm, HostTimes() if found is None else found.host)
            await load.run(warm_up(cases))
            return [await load.run(case) for case in cases]

    return virtual_time.run(main())


class _Load:
    """Clients of one engine."""

    def __init__(self, llm: AsyncLLM, host: HostTimes):
        self._llm = llm
        self._host = host
        self._loop = asyncio.get_running_loop()

    async def run(self, case: OnlineCase) -> OnlineRow:
        """Send every shot at its time, or as soon as a client is free."""
        start = self._loop.time()
        queue = deque(case.shots)
        answered: list[Answered] = []

        async def client() -> None:
            while queue:
                answered.append(await self._ask(queue.popleft()))

        async def once(shot: Shot) -> None:
            await asyncio.sleep(start + (shot.at or 0.0) - self._loop.time())
            answered.append(await self._ask(shot))

        clients = [client() for _ in range(case.clients)] or [once(shot) for shot in case.shots]
        await asyncio.gather(*clients)
        return summarize(case, [Outcome(answered, 0.0)], start)

    async def _ask(self, shot: Shot) -> Answered:
        sent = self._loop.time()
        await self._enter(shot.num_in)
        sink = _Events(self._host)
        params = SamplingParams(temperature=0.0, max_tokens=shot.num_out, ignore_eos=True)
        self._llm.submit(shot.prompt(self._llm.limits.vocab_size), params, sink)
        await sink.done
        return Answered(shot.long, sent, len(sink.times), sink.times.tobytes())

    async def _enter(self, num_prompt: int) -> None:
        """The way to the server, whose event loop reads the request.

        The way back is included, though it comes later: no client can tell.
        """
        reading = self._host.reading(num_prompt)
        await asyncio.sleep(max(0.0, self._host.client - reading))
        virtual_time.spend(reading)


class _Events:
    """A sink that takes as long to send tokens as a server, and notes when each one has gone."""

    def __init__(self, host: HostTimes) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.times = array("d")
        self.done: asyncio.Future[None] = self._loop.create_future()

    def emit(self, delta: TokenDelta) -> None:
        begin = 0.0 if self.times else self._host.begin
        virtual_time.spend(begin + self._host.sent * len(delta.token_ids))
        self.times.extend([self._loop.time()] * len(delta.token_ids))
        if delta.finish_reason is not None and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def read(files: list[Path]) -> list[OfflineRow | OnlineRow]:
    return rows_of(decode_report(file.read_bytes(), file) for file in files)


def cells(one: Compared) -> list[str]:
    name = UNITS.get(one.metric) or one.metric.replace("_", " ").removesuffix(" ms") + ", ms"
    return [one.case, name, f"{one.measured:,.2f}", f"{one.simulated:,.2f}", f"{one.ratio:.2f}"]


def main() -> None:
    names = [case.name for case in cases.OFFLINE] + [case.name for case in cases.online()]
    parser = argparse.ArgumentParser(description="Compare simulated with measured figures.")
    parser.add_argument("--profile", default="h200-8b", help="h200-8b, h200-0.6b or a FILE")
    parser.add_argument("--model", help="that a FILE is of: a folder, whose weights are not read")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--measured", action="append", help="figures to compare with", type=Path)
    args = parser.parse_args()
    try:
        print(compared(args))
    except (AsyncLLMError, OSError) as error:
        raise SystemExit(f"compare_simulated: error: {error}") from None


def compared(args: argparse.Namespace) -> str:
    """The table.

    Raises:
        BadRequest: nothing was measured of these cases.
        ModelError: see ``find_profile``; or the model is too short for the cases.
    """
    online = cases.online()
    measured = read(args.measured) if args.measured else measured_rows(args.profile)
    simulated: list[OfflineRow | OnlineRow] = []
    if wanted := [case for case in cases.OFFLINE if case.name in args.cases]:
        simulated += offline_rows(args.profile, wanted, args.model)
    # Those before a case shape what the scheduler knows when it begins.
    last = max((i for i, case in enumerate(online) if case.name in args.cases), default=-1)
    if last >= 0:
        rows = online_rows(args.profile, online[: last + 1], args.model)
        simulated += [row for row in rows if row.case in args.cases]
    lines = [cells(one) for one in compare(measured, simulated)]
    if not lines:
        raise BadRequest("none of these cases was measured")
    return table(["case", "figure", "measured", "simulated", "ratio"], lines)


if __name__ == "__main__":
    main()
