"""What ``batch`` and ``generate`` have in common: a file of answers, a line each as they finish."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.llm.llm import Speed


def append_answers(
    path: Path, main: Callable[[BinaryIO], Coroutine[None, None, int]], *, go_on: str
) -> int:
    """Run what appends to the file and returns how many have failed; returns an exit status.

    Args:
        go_on: how to go on after an interruption.
    """
    from asyncllm.event_loop import new_event_loop

    # The thread that drives the device must get the GIL back at once; the default is 5 ms.
    sys.setswitchinterval(1e-4)
    try:
        with path.open("ab") as out, asyncio.Runner(loop_factory=new_event_loop) as runner:
            failed = runner.run(main(out))
    except KeyboardInterrupt:
        say(f"interrupted; {go_on} goes on from here")
        raise
    return 1 if failed else 0


class AnswerLines:
    """Writes lines as they come, and counts them on a bar.

    Attributes:
        failed: lines that are errors.
    """

    def __init__(self, out: BinaryIO, speed: Speed, bar: Any):
        self.failed = 0
        self._out = out
        self._speed = speed
        self._bar = bar

    def write(self, line: bytes, *, failed: bool) -> None:
        """One more line."""
        self.failed += failed
        self._out.write(line)
        self._out.flush()
        self._bar.set_postfix_str(str(self._speed), refresh=False)
        self._bar.update()


@contextmanager
def answer_lines(out: BinaryIO, llm: AsyncLLM, total: int, unit: str) -> Iterator[AnswerLines]:
    """A bar for so many lines, each of which answers one ``unit``; says in the end how it went."""
    from tqdm import tqdm

    from asyncllm.llm.llm import Speed

    speed = Speed(llm.stats)
    with tqdm(total=total, unit=unit) as bar:
        lines = AnswerLines(out, speed, bar)
        yield lines
    say(
        f"{total - lines.failed} {unit}s answered, {lines.failed} failed: {speed.tokens:,} tokens "
        f"in {speed.seconds:,.1f} s, {speed}"
    )


def say(message: str) -> None:
    """To the user, beside the answers."""
    print(message, file=sys.stderr)


__all__ = ["AnswerLines", "answer_lines", "append_answers", "say"]
