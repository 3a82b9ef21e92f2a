"""What the server's own routes answer."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from asyncllm.server.http.answer import Answer
from asyncllm.server.http.errors import ErrorDetail
from asyncllm.server.openai.schemas import Usage
from asyncllm.server.trace import Trace
from asyncllm.wire.heartbeat import OperationName


class NamedTrace(Trace, kw_only=True):
    """The trace of the request of that id."""

    id: str


class Generated(Answer, kw_only=True):
    """A whole answer, or what is new of one: then all but the text comes with the last event."""

    text: str
    token_ids: list[int] | UnsetType = UNSET
    finish_reason: Literal["stop", "length", "abort"] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
    trace: Trace | UnsetType = UNSET


class Tokenized(Answer, kw_only=True):
    """Token ids, and on demand what each of them is."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Answer, kw_only=True):
    """The text of token ids."""

    prompt: str


class Model(Answer, kw_only=True, tag_field="object", tag="model"):
    """A name to ask for.

    ``root`` is the model that answers to it; ``quantization`` is that of its weights.
    """

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    quantization: str | None


class ModelList(Answer, kw_only=True, tag_field="object", tag="list"):
    """Every name that may be asked for."""

    data: list[Model]


class Status(Answer, kw_only=True):
    """All is well."""

    status: Literal["ready"]


class Health(Answer, kw_only=True):
    """The server's state, and the ages behind it in seconds; ``null`` for what there is not.

    ``ok``: a request runs or waits. Of the steps of the model, ``step`` is the oldest that has not
    ended; ``operation`` is what the thread does that runs them. ``stalled`` and ``dead`` come with
    status 503 and an ``error``.
    """

    status: Literal["loading", "idle", "ok", "draining", "stalled", "dead"]
    steps_done: int = 0
    last_step_age: float | None = None
    step: int | None = None
    step_age: float | None = None
    operation: OperationName | None = None
    operation_age: float | None = None
    running: int = 0
    waiting: int = 0
    error: ErrorDetail | UnsetType = UNSET


class Aborted(Answer, kw_only=True):
    """The request has ended."""

    id: str
    aborted: Literal[True]


class Load(Answer, kw_only=True):
    """How many requests are being served or wait to be."""

    server_load: int


class Version(Answer, kw_only=True):
    """The version of the server."""

    version: str
