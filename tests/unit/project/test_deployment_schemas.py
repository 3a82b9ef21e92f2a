"""The examples for Kubernetes, Compose and systemd against what these programs accept."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
#: The definition of each kind, and the version of the API in which it is.
KINDS = {
    "Deployment": ("apps/v1", "io.k8s.api.apps.v1.Deployment"),
    "Service": ("v1", "io.k8s.api.core.v1.Service"),
}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(gzip.decompress((DATA / name).read_bytes()))
    return found


def errors(validator: Draft202012Validator, document: object) -> list[str]:
    return [error.message for error in validator.iter_errors(document)]


def kubernetes_errors(text: str) -> list[str]:
    """What is wrong with each object of a manifest; unknown fields are."""
    definitions = schema("kubernetes-1.37-deployment-service.json.gz")
    found: list[str] = []
    for document in text.split("\n---\n"):
        made = msgspec.yaml.decode(document)
        version, name = KINDS[made["kind"]]
        assert made["apiVersion"] == version
        validator = Draft202012Validator({**definitions, "$ref": f"#/$defs/{name}"})
        found += errors(validator, made)
    return found


def manifest() -> str:
    return (ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")


def test_kubernetes_knows_every_field_of_the_manifest() -> None:
    assert kubernetes_errors(manifest()) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("livenessProbe:", "livenesProbe:"),
        ("containerPort: 8000", "containerPort: http"),
        ("periodSeconds: 10", "periodSecond: 10"),
        ("readOnly: true", 'readOnly: "true"'),
        ("secretName: asyncllm-keys", "name: asyncllm-keys"),
    ],
)
def test_mistakes_in_the_manifest_are_noticed(right: str, wrong: str) -> None:
    assert right in manifest()
    assert kubernetes_errors(manifest().replace(right, wrong)) != []


def compose_errors(text: str) -> list[str]:
    file = msgspec.yaml.decode(text)
    # Newer than this schema.
    assert re.fullmatch("[a-z0-9][a-z0-9_-]*", file.pop("name", "none"))
    return errors(Draft202012Validator(schema("compose-spec.json.gz")), file)


@pytest.mark.parametrize("name", ["compose.yml", "compose.metrics.yml"])
def test_compose_knows_every_field(name: str) -> None:
    text = (ROOT / "docker" / name).read_text(encoding="utf-8")
    assert compose_errors(text) == []
    assert compose_errors(text.replace("restart:", "restarts:")) != []


def verified(unit: Path) -> str:
    """What systemd says about a unit: nothing, if there is nothing wrong with it."""
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr + (f"exit status {done.returncode}" * (done.returncode != 0))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "asyncllm.service").read_text(encoding="utf-8")
    program = tmp_path / "asyncllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = text.replace("ExecStart=/opt/asyncllm/bin/asyncllm ", f"ExecStart={program} ")
    unit = tmp_path / "asyncllm.service"
    unit.write_text(text, encoding="utf-8")
    assert verified(unit) == ""
    unit.write_text(text.replace("KillMode=mixed", "KilMode=mixed"), encoding="utf-8")
    assert "KilMode" in verified(unit)
