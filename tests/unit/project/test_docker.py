"""The image's files against the program that they package."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncllm import __main__ as command_line
from asyncllm.cli.commands import kernels, serve
from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import create_app

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
TARGETS = ("cpu", "gpu")


class Instruction(NamedTuple):
    name: str
    value: str


def instructions() -> list[Instruction]:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = code.replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def stages() -> dict[str, list[Instruction]]:
    """Each stage's instructions, by its name, after those of the stage that it builds on."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for instruction in instructions():
        if instruction.name == "FROM":
            base, name = instruction.value.split(" AS ")
            found[name] = list(found.get(base, []))
        elif name:
            found[name].append(instruction)
    return found


def last(target: str, name: str) -> str:
    """The value that is in force in the image."""
    return [value for found, value in stages()[target] if found == name][-1]


def parsed(
    monkeypatch: pytest.MonkeyPatch, command: Any, arguments: list[str]
) -> argparse.Namespace:
    """How the command line understands the arguments of ``command``."""
    given: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        given.append(args)
        return 0

    monkeypatch.setattr(command, "run", run)
    assert command_line.main(arguments) == 0
    return given[0]


def test_the_default_target_is_for_gpus() -> None:
    names = list(stages())
    assert names[-1] == "gpu"
    assert "cpu" in names


@pytest.mark.parametrize("target", TARGETS)
def test_the_server_is_no_root(target: str) -> None:
    user, group = last(target, "USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert stages()[target][-1].name == "USER"


@pytest.fixture
def run_image(tmp_path: Path) -> Callable[..., list[str]]:
    """What the entry point runs with a container's arguments: those of the console script."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "asyncllm" in project["scripts"]
    script = tmp_path / "asyncllm"
    script.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    script.chmod(0o755)

    def run(*arguments: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        command = ["sh", str(ROOT / "docker" / "entrypoint.sh"), *arguments]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, check=True)
        return done.stdout.decode().splitlines()

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_is_the_script(target: str) -> None:
    [name] = json.loads(last(target, "ENTRYPOINT"))
    copied = f"docker/entrypoint.sh /usr/local/bin/{name}"
    assert Instruction("COPY", copied) in stages()[target]
    assert os.access(ROOT / "docker" / "entrypoint.sh", os.X_OK)


@pytest.mark.parametrize("target", TARGETS)
def test_without_arguments_it_serves_to_the_outside(
    target: str, run_image: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parsed(monkeypatch, serve, run_image(*json.loads(last(target, "CMD"))))
    assert args.host == "0.0.0.0"
    assert "port" not in args  # so that the port is the default, which is exposed:
    assert last(target, "EXPOSE") == str(ServerConfig().port)


@pytest.mark.parametrize(
    ("arguments", "model", "host"),
    [
        (["serve", "some/model"], "some/model", "0.0.0.0"),
        (["serve", "some/model", "--port", "9000"], "some/model", "0.0.0.0"),
        (["serve", "--api-key", "a b", "some/model"], "some/model", "0.0.0.0"),
        (["serve", "some/model", "--host", "127.0.0.1"], "some/model", "127.0.0.1"),
        (["serve", "--host=127.0.0.1"], None, "127.0.0.1"),
        (["some/model"], "some/model", "0.0.0.0"),
        (["/models/mine", "--host", "::"], "/models/mine", "::"),
        (["--model", "some/model", "--tensor-parallel-size", "2"], "some/model", "0.0.0.0"),
    ],
)
def test_a_server_listens_to_the_outside_unless_told_otherwise(
    arguments: list[str],
    model: str | None,
    host: str,
    run_image: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parsed(monkeypatch, serve, run_image(*arguments))
    assert (getattr(args, "model", None), args.host) == (model, host)


@pytest.mark.parametrize(
    "arguments", [[], ["--version"], ["kernels", "build"], ["generate", "some/model", "a  b"]]
)
def test_other_commands_are_left_as_they_are(
    arguments: list[str], run_image: Callable[..., list[str]]
) -> None:
    assert run_image(*arguments) == (arguments or [""])


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_asks_a_route_that_exists(target: str) -> None:
    match = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", last(target, "HEALTHCHECK"))
    assert match is not None
    port, path = match.groups()
    assert port == last(target, "EXPOSE")
    not_started: Any = None
    app = create_app(not_started, ServerConfig())
    assert path in {resource.canonical for resource in app.router.resources()}


@pytest.mark.parametrize("target", TARGETS)
def test_models_are_kept_in_a_volume(target: str) -> None:
    variables = [
        word for name, value in stages()[target] if name == "ENV" for word in value.split()
    ]
    assert f"HF_HOME={last(target, 'VOLUME')}" in variables


@pytest.mark.parametrize("target", TARGETS)
def test_a_change_of_code_does_not_install_the_dependencies_again(target: str) -> None:
    packages = stages()[f"packages-{target}"]
    copied = [word for name, value in packages if name == "COPY" for word in value.split()[:-1]]
    assert sorted(copied) == ["constraints.txt", "docker/requirements.py", "pyproject.toml"]
    assert any("--constraint constraints.txt" in value for _, value in packages)
    assert Instruction("COPY", f"--from=packages-{target} /opt/venv /opt/venv") in stages()[target]


def test_everything_copied_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for name, value in instructions():
        if name == "COPY" and not value.startswith("--from") and value != ". .":
            for source in value.split()[:-1]:
                assert source in allowed
                assert (ROOT / source).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"asyncllm", "pyproject.toml", project["readme"]} <= allowed  # what the wheel needs


def test_the_kernels_of_the_image_are_valid_options(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dict(value.split("=", 1) for name, value in instructions() if name == "ARG")
    [options] = shlex.split(arguments["KERNELS"])
    args = parsed(monkeypatch, kernels, ["kernels", "build", *shlex.split(options)])
    assert args.arch


def test_both_choices_about_flashinfer_have_a_stage() -> None:
    [base] = [value for name, value in instructions() if value.endswith(" AS prebuilt")]
    arguments = dict(value.split("=", 1) for name, value in instructions() if name == "ARG")
    assert arguments["FLASHINFER"] == "no"
    for choice in ("yes", "no"):
        name = base.split()[0].replace("${FLASHINFER}", choice)
        built = [value for kind, value in stages()[name] if kind == "RUN"]
        assert any("MODEL_KERNELS" in value for value in built)
        assert any("build ${KERNELS}" in value for value in built) == (choice == "yes")


def test_the_models_of_the_image_are_valid_options(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dict(value.split("=", 1) for name, value in instructions() if name == "ARG")
    [options] = shlex.split(arguments["MODEL_KERNELS"])
    args = parsed(monkeypatch, kernels, ["kernels", "build", *shlex.split(options)])
    assert args.arch == ["9.0a"]
    assert args.models == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"]


def test_kernels_of_named_models_go_where_serving_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = next(v for n, v in stages()["kernels"] if n == "RUN" and "MODEL_KERNELS" in v)
    command = re.search(r"asyncllm (kernels build \$\{MODEL_KERNELS\} [^;]*);", built)
    assert command is not None
    options = "--arch 9.0a --model some/model --model other/model"
    arguments = shlex.split(command[1].replace("${MODEL_KERNELS}", options))
    args = parsed(monkeypatch, kernels, arguments)
    assert args.models == ["some/model", "other/model"]
    # Triton's default place in the home folder of the user that serves.
    home = last("gpu", "WORKDIR")
    assert args.kernel_cache == f"{home}/.triton/cache"
    copied = f"--from=prebuilt --chown=asyncllm:asyncllm {home}/.triton {home}/.triton"
    assert Instruction("COPY", copied) in stages()["gpu"]


def test_triton_has_a_compiler_for_other_models() -> None:
    installed = [value for name, value in stages()["gpu"] if name == "RUN" and "apt-get" in value]
    assert any(" gcc " in value for value in installed)


def test_the_script_for_buildah_knows_the_arguments_of_the_dockerfile() -> None:
    script = ROOT / "docker" / "build.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    declared = {value.split("=")[0] for name, value in instructions() if name == "ARG"}
    named = set(re.findall(r'--build-arg "?(\w+)=', text))
    loop = re.search(r"for argument in ([A-Z_ ]+);", text)
    assert loop is not None
    assert named | set(loop[1].split()) <= declared
    assert last("cpu", "ENTRYPOINT") == json.dumps(["asyncllm-entrypoint"])
    assert " asyncllm-entrypoint serve " in text


def test_compose_has_a_service_for_each_target(
    run_image: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = pytest.importorskip("yaml")
    path = ROOT / "docker" / "compose.yml"
    compose = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert compose["services"].keys() == set(TARGETS)
    for target, service in compose["services"].items():
        build = service["build"]
        assert build["target"] == target
        assert (path.parent / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).exists()
        assert service["profiles"] == [target]
        assert service["restart"] == "unless-stopped"
        [volume] = service["volumes"]
        name, _, mounted = volume.partition(":")
        assert name in compose["volumes"]
        assert mounted == last(target, "VOLUME")
        [port] = service["ports"]
        assert port.endswith(":" + last(target, "EXPOSE"))
        command = service["command"].replace("${MODEL:-}", "some/model")
        args = parsed(monkeypatch, serve, run_image(*shlex.split(command)))
        assert (args.model, args.host) == ("some/model", "0.0.0.0")
    assert compose["services"]["gpu"]["deploy"]["resources"]["reservations"]["devices"]
