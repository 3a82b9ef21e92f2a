"""The Grafana dashboard and what starts it, against a server's /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.config.server_config import ServerConfig
from asyncllm.supervise.front.metrics import Own
from tests.support.server.serving import serving

DOCKER = Path(__file__).parents[3] / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "asyncllm.json"

#: Labels that Prometheus adds to every series, and a server with replicas to its gauges.
ADDED = {"instance", "job", "replica"}
METRIC = re.compile(r"\basyncllm_\w+")
#: Between braces, ``by (...)``, and in legends.
LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)|\bby \(([^)]*)\)|\bignoring \(([^)]*)\)|\{\{(\w+)\}\}")
STRING = re.compile(r'"[^"]*"')


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of each series of a server that has answered, by its name; and of replicas."""
    found: dict[str, set[str]] = {}
    with serving() as server:
        text = server.get("/metrics").body.decode() + Own().page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def targets() -> Iterator[tuple[str, str, str]]:
    """(title of the panel, expression, legend)"""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def problems(expression: str, legend: str, series: dict[str, set[str]]) -> list[str]:
    """Names in it that no series has."""
    names = METRIC.findall(expression)
    known = ADDED.union(*(series.get(name, set()) for name in names))
    bare = STRING.sub('""', expression)
    used = {
        label.strip()
        for match in LABELS.finditer(f"{bare} {legend}")
        for group in match.groups()
        if group
        for label in group.split(",")
    }
    unknown = [name for name in names if name not in series]
    return [*unknown, *sorted(used - known)] + ([] if names else ["no metric at all"])


def test_every_expression_is_of_series_that_exist(series: dict[str, set[str]]) -> None:
    wrong = {
        f"{title}: {expression}": found
        for title, expression, legend in targets()
        if (found := problems(expression, legend, series))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("expression", "legend", "found"),
    [
        ("rate(asyncllm_generation_tokens_total[1m])", "", []),
        ("rate(asyncllm_generation_tokens[1m])", "", ["asyncllm_generation_tokens"]),
        ("rate(asyncllm_queue_time_seconds[1m])", "", ["asyncllm_queue_time_seconds"]),
        ("sum by (le) (asyncllm_queue_time_seconds_bucket)", "", []),
        ("sum by (cause) (asyncllm_requests_refused_total)", "{{reason}}", ["reason"]),
        ('asyncllm_requests_refused_total{why="asyncllm"}', "", ["why"]),
        ("up", "", ["no metric at all"]),
    ],
)
def test_what_is_not_there_is_noticed(
    series: dict[str, set[str]], expression: str, legend: str, found: list[str]
) -> None:
    assert problems(expression, legend, series) == found


def unknown(written: Any, read: Any, path: str) -> list[str]:
    """Paths of what is written and was not read."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [
            name
            for key, value in written.items()
            for name in (
                unknown(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
            )
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = zip(written, read, strict=True)
        return [name for pair in pairs for name in unknown(*pair, f"{path}[]")]
    return [] if written == read else [path]


def read_by_grafana(written: dict[str, Any]) -> Any:
    """The dashboard as the classes see it that Grafana publishes for its format."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(written)))


def test_grafana_knows_every_field() -> None:
    written = dashboard()
    lost = set(unknown(written, read_by_grafana(written), ""))
    # Grafana's own exports have it; it is what a variable's editor shows.
    assert lost == {".templating.list[].definition"}


def test_a_field_that_grafana_does_not_know_is_noticed() -> None:
    written = dashboard()
    panel = next(panel for panel in written["panels"] if panel["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
    lost = unknown(written, read_by_grafana(written), "")
    assert ".panels[].fieldConfig.defaults.custom.lineWidht" in lost


def test_panels_neither_overlap_nor_lack_a_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"]
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_the_variable_lists_servers(series: dict[str, set[str]]) -> None:
    queries = [variable["query"] for variable in dashboard()["templating"]["list"]]
    [servers] = [query["query"] for query in queries if isinstance(query, dict)]
    assert METRIC.findall(servers)[0] in series


def read(*path: str) -> Any:
    return msgspec.yaml.decode(DOCKER.joinpath(*path).read_bytes())


def test_prometheus_and_grafana_find_what_they_need() -> None:
    base, added = read("compose.yml")["services"], read("compose.metrics.yml")["services"]
    [job] = read("prometheus.yml")["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert port == str(ServerConfig().port)
    for service in base:
        assert added[service]["networks"]["default"]["aliases"] == [host]
    assert set(added) - set(base) == {"prometheus", "grafana"}

    for service in ("prometheus", "grafana"):
        for port in added[service]["ports"]:
            assert port.startswith("127.0.0.1:"), "there is no password"
        for volume in added[service]["volumes"]:
            source = volume.split(":")[0]
            # Relative to the first compose file's folder.
            assert not source.startswith("./") or (DOCKER / source).exists()

    [source] = read("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read("grafana", "provisioning", "dashboards", "asyncllm.yml")["providers"]
    mounted = [volume.split(":")[1] for volume in added["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    home = added["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
