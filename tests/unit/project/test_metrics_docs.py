"""docs/observability.md lists every metric, as the tables describe it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncllm.server.metrics import engine, server
from asyncllm.server.metrics.metric import Metric
from asyncllm.supervise.front.metrics import OWN

ROOT = Path(__file__).parents[3]
OURS: tuple[Metric[Any], ...] = (*server.METRICS, *engine.METRICS)


def row(metric: Metric[Any]) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |"


def test_the_list_is_that_of_the_tables() -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    listed = text.partition("## All metrics")[2]
    rows = [line for line in listed.splitlines() if line.startswith("| `")]
    assert rows == [row(metric) for metric in OURS]


def test_names_are_well_formed_and_used_once() -> None:
    names = [metric.name for metric in (*OURS, *server.VLLM_METRICS)]
    assert len(names) == len(set(names))
    for metric in (*OURS, *server.VLLM_METRICS):
        assert re.fullmatch(r"(asyncllm_|vllm:)[a-z0-9_]+", metric.name)
        assert metric.meaning.endswith("."), metric.name
        if metric.kind == "counter":
            assert metric.name.endswith("_total"), metric.name


def test_documents_name_no_metric_that_is_not() -> None:
    known = {metric.name for metric in (*OURS, *server.VLLM_METRICS)} | {"vllm:lora_requests_info"}
    known |= {name for name, *_ in OWN}
    for document in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"):
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"\b(?:asyncllm_|vllm:)[a-z0-9_]+\b", text))
        assert named <= known | {"asyncllm_server"}, document
