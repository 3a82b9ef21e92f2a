"""Whom a benchmark measures, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.bench.cases import LARGEST_ID
from asyncllm.bench.child import ServerProcess, changed
from asyncllm.bench.load import Target
from asyncllm.bench.machine import describe
from asyncllm.bench.report import Report
from asyncllm.bench.served import Served, ask

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.llm.async_llm import AsyncLLM


class Subject(NamedTuple):
    """A report that has no rows yet, whom to ask, and the longest sequence, if the server says."""

    report: Report
    target: Target
    max_model_len: int | None


def of_llm(llm: AsyncLLM, start_s: float) -> Report:
    """The report of a model in this process."""
    limits = llm.limits
    settings = {
        "policy": llm.config.policy,
        "dtype": limits.dtype,
        "KV cache tokens": limits.num_pages * limits.page_size,
        "most sequences": limits.max_num_seqs,
        "most tokens in a step": limits.max_num_batched_tokens,
    }
    machine = describe(limits.device)
    return Report(machine=machine, model=llm.model_name, settings=settings, start_s=start_s)


def of_url(url: str, api_key: str | None, model: str | None, vocab_size: int | None) -> Subject:
    """A server that runs already. Raises like ``served.ask``."""
    served = ask(url, api_key, model)
    report = Report(machine=f"the server at {served.url}", model=served.model)
    return _subject(report, served, vocab_size, api_key)


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
        yield _subject(report, served, vocab_size, None)


def _subject(
    report: Report, served: Served, vocab_size: int | None, api_key: str | None
) -> Subject:
    # Other engines do not tell; hardly any vocabulary is smaller than the largest id of the cases.
    below = vocab_size or served.vocab_size or LARGEST_ID + 1
    return Subject(report, Target(served.url, served.model, below, api_key), served.max_model_len)
