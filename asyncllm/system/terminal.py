"""What commands draw in a terminal, with rich: tables and progress bars."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress

#: Columns that texts and most tables fit in.
WIDTH: Final = 100
#: A bar is drawn at most this often: drawing takes a millisecond of the thread that calls.
_DRAW_SECONDS: Final = 0.1
#: Where stderr is no terminal, a benchmark's progress is a line at most this often.
LINE_SECONDS: Final = 15.0
#: Held by whoever draws a bar: there is one terminal, and a second bar would spoil the first.
_DRAWING: Final = threading.Lock()
#: A smaller model is loaded before a line in a log file would be worth it.
LOGGED_BYTES: Final = 100 * 2**20


def table(head: Sequence[str], rows: Sequence[Sequence[str]], legend: str = "") -> str:
    """A table as text: the first column to the left, the others to the right, the legend below."""
    from rich.console import Console
    from rich.table import Table

    # Wide enough that no cell is ever cut.
    console = Console(width=100 * WIDTH, color_system=None, markup=False, highlight=False)
    grid = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    for number, name in enumerate(head):
        grid.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    if console.measure(grid).maximum > WIDTH:
        grid.padding = (0, 0, 0, 1)
    with console.capture() as captured:
        console.print(grid)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, wrapped(legend)] if legend else lines)


def wrapped(text: str) -> str:
    """A paragraph in lines of at most WIDTH, all but the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def is_free() -> bool:
    """Whether stderr is a terminal in which neither tqdm nor rich draws a bar of the program's."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    kind = getattr(sys.modules.get("rich.live"), "_RefreshThread", ())
    threads = [thread for thread in threading.enumerate() if isinstance(thread, kind)]
    # Those of bars that have ended may run a moment longer.
    rich = not all(thread.done.is_set() for thread in threads)
    return sys.stderr.isatty() and not getattr(tqdm, "_instances", ()) and not rich


@contextmanager
def progress_bar(
    label: str, total: int, unit: str, *, shown: bool = True, transient: bool = False
) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr. Yields a function to call with the amount done and a note beside the bar.

    Where stderr is no terminal, only the last state is printed, unless ``transient``. While another
    bar is drawn, none is.

    Args:
        unit: of ``total``; "bytes" are shown in MB and with a rate.
        transient: the bar disappears when it ends.
    """
    drawn, owned = 0.0, shown and _DRAWING.acquire(blocking=False)

    def show(done: int, note: str = "") -> None:
        nonlocal drawn
        progress.update(task, completed=done, note=note)
        now = time.monotonic()
        if now - drawn >= _DRAW_SECONDS:
            drawn = now
            progress.refresh()

    try:
        progress = _progress(unit, transient=transient, disable=not owned)
        task = progress.add_task(f"{label} " if label else "", total=total, note="")
        with progress:
            yield show
    finally:
        if owned:
            _DRAWING.release()


def _progress(unit: str, *, transient: bool, disable: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()]
    if unit != "bytes":
        amount = [TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}")]
    return Progress(
        TextColumn("{task.description}{task.percentage:>3.0f}%", markup=False),
        BarColumn(),
        *amount,
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread that takes the GIL from a device's
        transient=transient,
        disable=disable,
    )


@contextmanager
def case_progress(case: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """How far a case is, on stderr: a bar in a terminal, elsewhere a line now and then.

    Yields a function to call with the amount done.
    """
    if sys.stderr.isatty():
        with progress_bar(case, total, unit, transient=True) as show:
            yield lambda done: show(done, "")
        return
    next_line = time.monotonic() + LINE_SECONDS

    def print_line(done: int) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_SECONDS
            print(f"{case}: {done:,} of {total:,} {unit}", file=sys.stderr)

    yield print_line


class LoadingBar:
    """Draws what ``AsyncLLM(progress=...)`` reports, in bytes, on stderr."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._show: Callable[[int, str], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._show is None:
            shown = sys.stderr.isatty() or total > LOGGED_BYTES
            bar = progress_bar("loading", total, "bytes", shown=shown)
            self._show = self._open.enter_context(bar)
        self._show(done, "")
        if done >= total:
            self._open.close()
