"""Errors without this package's own frames, which say nothing to the program that called it."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar, cast

from asyncllm.errors import AsyncLLMError

F = TypeVar("F", bound=Callable[..., Any])

#: Their message or kind says all. Any other error is a bug, whose frames are needed.
BRIEF: Final = (AsyncLLMError, CancelledError, KeyboardInterrupt)


def shorten(error: BaseException) -> None:
    """Forget where an error comes from, before it is raised again; not with ``python -X dev``."""
    if not sys.flags.dev_mode:
        error.__traceback__ = None
        error.__cause__ = None
        error.__suppress_context__ = True


def brief(method: F) -> F:
    """A public method whose errors show the caller's frames only.

    A bare ``raise`` adds no frame.
    """

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except BRIEF as error:
            shorten(error)
            raise

    @wraps(method)
    async def call_async(*args: Any, **options: Any) -> Any:
        try:
            return await method(*args, **options)
        except BRIEF as error:
            shorten(error)
            raise

    return cast("F", call_async if iscoroutinefunction(method) else call)
