"""The examples for Kubernetes and systemd against the program that they start."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncllm.__main__ import main
from asyncllm.cli.commands import serve
from asyncllm.cli.options import config_from_args
from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import ROUTES
from asyncllm.supervise.signals import GRACE_SECONDS
from asyncllm.supervise.supervisor import KILL_SECONDS

if TYPE_CHECKING:
    import argparse

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """How the command line understood what ``main`` was called with."""
    given: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        given.append(args)
        return 0

    monkeypatch.setattr(serve, "run", run)
    return given


def manifest() -> dict[str, Any]:
    """The objects of the example, by kind."""
    text = (EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")
    objects = [msgspec.yaml.decode(document) for document in text.split("\n---\n")]
    return {made["kind"]: made for made in objects}


def pod() -> Any:
    return manifest()["Deployment"]["spec"]["template"]["spec"]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(EXAMPLES / "asyncllm.service", encoding="utf-8")
    return parser["Service"]


def end_seconds(config: ServerConfig) -> float:
    """How long the process may take to end after SIGTERM."""
    return config.drain_seconds + GRACE_SECONDS + KILL_SECONDS


def test_the_pod_has_time_to_drain(parsed: list[argparse.Namespace]) -> None:
    [container] = pod()["containers"]
    assert main(container["args"]) == 0
    config = config_from_args(parsed[0], ServerConfig)
    assert config.drain_seconds > ServerConfig().drain_seconds, "it is given"
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod()["terminationGracePeriodSeconds"] >= int(seconds) + end_seconds(config)
    [port] = container["ports"]
    assert port["containerPort"] == config.port


def test_probes_ask_routes_that_need_no_key() -> None:
    [container] = pod()["containers"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    open_paths = {route.path for route in ROUTES if route.method == "GET" and not route.needs_key}
    assert set(paths.values()) <= open_paths
    names = {port["name"] for port in container["ports"]}
    assert {probe["httpGet"]["port"] for probe in probes.values()} <= names


def test_the_service_finds_the_pod() -> None:
    deployment, service = manifest()["Deployment"]["spec"], manifest()["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    [container] = pod()["containers"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= names


def test_mounts_have_volumes() -> None:
    [container] = pod()["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


def test_the_pod_meets_the_restricted_standard() -> None:
    """Kubernetes' Pod Security Standard, which a namespace may enforce."""
    spec, [container] = pod(), pod()["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all(volume.keys() & {"emptyDir", "secret"} for volume in spec["volumes"])


def test_the_pod_runs_as_the_user_of_the_image() -> None:
    """``runAsNonRoot`` needs a number, not a name; volumes belong to the user's group."""
    text = (EXAMPLES.parent / "docker" / "Dockerfile").read_text(encoding="utf-8")
    [user, *others] = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert set(others) <= {user}
    assert pod()["securityContext"]["fsGroup"] == int(user[1])
    assert "runAsUser" not in pod()["securityContext"]
    [models] = re.findall(r"^VOLUME (\S+)$", text, re.MULTILINE)
    assert models in {mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]}


def test_the_pod_is_not_the_first_to_be_evicted() -> None:
    """Limits of GPUs alone leave a pod without any priority for memory."""
    resources = pod()["containers"][0]["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": 1}
    assert resources["requests"].keys() == {"cpu", "memory"}


def test_the_comment_signals_through_a_shell() -> None:
    """Slim images of Debian have no program ``kill``."""
    text = (EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")
    [command] = re.findall(r"kubectl exec deploy/asyncllm -- (.+)", text)
    assert shlex.split(command) == ["sh", "-c", "kill -HUP 1"]


def test_the_unit_has_time_to_drain(parsed: list[argparse.Namespace], tmp_path: Path) -> None:
    program, *words = shlex.split(unit()["ExecStart"])
    assert program.endswith("/asyncllm")
    config = tmp_path / "serve.yaml"
    config.write_text("max-num-seqs: 64\n")
    assert main([str(config) if word.endswith("serve.yaml") else word for word in words]) == 0
    assert int(unit()["TimeoutStopSec"]) >= end_seconds(config_from_args(parsed[0], ServerConfig))
    # Otherwise systemd would signal both processes.
    assert unit()["KillMode"] == "mixed"
    assert "-HUP $MAINPID" in unit()["ExecReload"]
