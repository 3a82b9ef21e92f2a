"""Request: one sequence and its output."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncllm.engine.requests.prompt_reader import PromptReader
from asyncllm.engine.requests.stream import OutputStream
from asyncllm.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Request:
    """One sequence and its output.

    Attributes:
        is_part: it is part of another request, which is counted instead.
        reader: of its prompt, until the result is delivered; None when nothing is wanted.
        expiry: the timer of its deadline.
    """

    sequence: Sequence
    stream: OutputStream
    is_part: bool
    reader: PromptReader | None = None
    expiry: asyncio.TimerHandle | None = None
