"""Whom a benchmark measures over HTTP, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from asyncllm import demo
from asyncllm.bench.cases import LARGEST_ID
from asyncllm.bench.child import ServerProcess, changed
from asyncllm.bench.load import Target
from asyncllm.bench.machine import describe
from asyncllm.bench.report import Report
from asyncllm.bench.served import ask
from asyncllm.models.hub import resolve_folder
from asyncllm.models.spec import read_spec

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig


class Subject(NamedTuple):
    """A report that has no rows yet, whom to ask, and the longest sequence, if the server says."""

    report: Report
    target: Target
    max_model_len: int | None


def of_url(url: str, api_key: str | None, model: str | None, vocab_size: int | None) -> Subject:
    """A server that runs already. Raises like ``served.ask``."""
    served = ask(url, api_key, model)
    report = Report(machine=f"the server at {served.url}", model=served.model)
    target = Target(served.url, served.model, vocab_size or LARGEST_ID + 1, api_key)
    return Subject(report, target, served.max_model_len)


@contextmanager
def of_process(config: EngineConfig, vocab_size: int | None) -> Iterator[Subject]:
    """A server of our own, which ends with the context. Raises like ``ServerProcess``."""
    with ServerProcess(config) as server:
        served = ask(server.url)
        settings = {name: value for name, value in changed(config).items() if name != "model"}
        report = Report(
            machine=describe(server.device),
            model=served.model,
            settings=settings,
            start_s=server.start_s,
        )
        if vocab_size is None:
            folder = resolve_folder(config.model, config.revision) if config.model else demo.path()
            vocab_size = read_spec(folder).vocab_size
        yield Subject(report, Target(served.url, served.model, vocab_size), served.max_model_len)
