"""What crosses between the event loop and the executor's process, besides plans and results."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead, ModelError, QueueFull
from asyncllm.executor.startup_bill import StartupItem


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Bytes of weights loaded so far, and in all."""

    done: int
    total: int


class KernelsWanted(msgspec.Struct, tag=True, frozen=True):
    """The process waits for kernels that are being compiled; ``KernelsReady`` answers."""


class Started(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded; ``bill`` are the phases of that."""

    limits: EngineLimits
    bill: tuple[StartupItem, ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The process ends, because of an error; of other kinds, its log has the traceback."""

    kind: Literal["model", "dead", "other"]
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """What to say of an error that ends the process."""
        if isinstance(error, ModelError):
            return cls("model", error.message, error.param)
        if isinstance(error, EngineDead):
            return cls("dead", error.message)
        return cls("other", repr(error))

    def loading_error(self) -> AsyncLLMError:
        """The error of ``Executor.start``."""
        if self.kind == "model":
            return ModelError(self.message, param=self.param)
        if self.kind == "dead":
            return EngineDead(self.message)
        return EngineDead(f"the executor failed: {self.message}; its log has the traceback")

    def serving_error(self) -> EngineDead:
        """The error of all requests."""
        if self.kind == "dead":
            return EngineDead(self.message)
        return EngineDead("the executor died; its log has the cause")


class Compiled(msgspec.Struct, tag=True, frozen=True):
    """A grammar is ready; the process keeps it until ``Forget``."""

    number: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A grammar cannot be had."""

    number: int
    kind: Literal["bad request", "queue full", "other"]
    message: str
    retry_after: float = 0.0

    @classmethod
    def of(cls, number: int, error: Exception) -> Refused:
        """What to say of a grammar that was refused with an error."""
        if isinstance(error, BadRequest):
            return cls(number, "bad request", error.message)
        if isinstance(error, QueueFull):
            return cls(number, "queue full", error.message, error.retry_after)
        return cls(number, "other", repr(error))

    def error(self) -> Exception:
        """The error of ``Grammars.compile``."""
        if self.kind == "bad request":
            return BadRequest(self.message, param="grammar")
        if self.kind == "queue full":
            return QueueFull(self.message, retry_after=self.retry_after)
        return RuntimeError(f"compiling a grammar failed: {self.message}")


class KernelsReady(msgspec.Struct, tag=True, frozen=True):
    """Nobody compiles kernels any more."""


class Compile(msgspec.Struct, tag=True, frozen=True):
    """Compile a grammar; ``spec`` is of ``encode_spec``."""

    number: int
    spec: bytes


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Nobody needs this grammar any more."""

    number: int


FromProcess = Progress | KernelsWanted | Started | Failed | Compiled | Refused
ToProcess = KernelsReady | Compile | Forget

encode = msgspec.msgpack.Encoder().encode
decode_from_process = msgspec.msgpack.Decoder(FromProcess).decode
decode_to_process = msgspec.msgpack.Decoder(ToProcess).decode
