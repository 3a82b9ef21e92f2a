"""Every command takes the model as its first argument or as --model; files keep their places."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from asyncllm.__main__ import main

#: A command line of each command without its model, and where its run function is.
COMMANDS = {
    "serve": ("serve", "asyncllm.cli.commands.serve.run"),
    "chat": ("chat", "asyncllm.cli.commands.chat.run"),
    "generate": ("generate p.txt -o o.jsonl", "asyncllm.cli.commands.generate.run"),
    "batch": ("batch in.jsonl out.jsonl", "asyncllm.cli.commands.batch.run"),
    "bench offline": ("bench offline", "asyncllm.cli.commands.bench.run_offline"),
    "bench serve": ("bench serve", "asyncllm.cli.commands.bench.run_serve"),
}


def parse(monkeypatch: pytest.MonkeyPatch, run: str, line: str) -> argparse.Namespace:
    seen: list[Any] = []

    def record(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    monkeypatch.setattr(run, record)
    assert main(line.split()) == 0
    [args] = seen
    assert isinstance(args, argparse.Namespace)
    return args


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_comes_first_or_as_an_option(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, run = COMMANDS[command]
    rest = line.removeprefix(command)
    for named in (
        f"{command} org/m{rest}",
        f"{line} --model org/m",
        f"{command} --model org/m{rest}",
        f"{command} org/m{rest} --model org/m",
    ):
        args = parse(monkeypatch, run, named)
        assert args.model == "org/m", named
        check_files(command, args)
    unnamed = parse(monkeypatch, run, line)
    assert "model" not in unnamed
    check_files(command, unnamed)


def check_files(command: str, args: argparse.Namespace) -> None:
    files = {"generate": ("p.txt", "o.jsonl"), "batch": ("in.jsonl", "out.jsonl")}
    if command in files:
        assert (str(args.file), str(args.output)) == files[command]


@pytest.mark.parametrize(
    "line",
    [
        "generate org/m -o o.jsonl p.txt",
        "generate -o o.jsonl org/m p.txt",
        "generate org/m p.txt -o o.jsonl",
    ],
)
def test_options_may_stand_between_the_arguments(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse(monkeypatch, "asyncllm.cli.commands.generate.run", line)
    assert (args.model, str(args.file), str(args.output)) == ("org/m", "p.txt", "o.jsonl")


def test_kernels_are_built_for_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.cli.commands.kernels import models_of

    for line in ("a b --arch 9.0a", "--arch 9.0a --model a --model b", "a b --model b --model a"):
        args = parse(monkeypatch, "asyncllm.cli.commands.kernels.run", f"kernels build {line}")
        assert models_of(args) == ["a", "b"]
