"""Options generated from Structs, and what the program does with bad ones."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from asyncllm import __version__
from asyncllm.__main__ import main
from asyncllm.cli.options import (
    add_config_options,
    add_sampling_options,
    config_from_args,
    given_options,
    sampling_params,
)
from asyncllm.cli.parser import CommandParser
from asyncllm.config import EngineConfig
from asyncllm.config.option_fields import GROUPS
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import ModelError
from asyncllm.types import SamplingParams


class Example(msgspec.Struct, frozen=True, kw_only=True):
    a_number: Annotated[int, Meta(description="half is 50%")] = 3
    maybe: Annotated[float | None, Meta(description="none by default")] = None
    word: str = "x"
    choice: Literal["a", "b"] = "a"
    flag: bool = False
    many: tuple[str, ...] = ()


def parser_of(struct: type[msgspec.Struct], **options: Any) -> argparse.ArgumentParser:
    parser = CommandParser()
    add_config_options(parser, struct, skip=(), **options)
    parser.set_defaults(parser=parser)
    return parser


def test_every_kind_of_field_goes_round() -> None:
    parser = parser_of(Example)
    assert config_from_args(parser.parse_args([]), Example) == Example()
    line = "--a-number 4 --maybe 0.5 --word y --choice b --flag --many p --many q"
    assert config_from_args(parser.parse_args(line.split()), Example) == Example(
        a_number=4, maybe=0.5, word="y", choice="b", flag=True, many=("p", "q")
    )
    assert given_options(parser.parse_args(["--no-flag"]), Example) == {"flag": False}


def test_help_has_descriptions_and_defaults() -> None:
    text = " ".join(parser_of(Example).format_help().split())
    assert "half is 50% (default: 3)" in text
    assert "none by default --word" in text
    assert "--choice {a,b}" in text


@pytest.mark.parametrize("struct", [EngineConfig, ServerConfig])
def test_every_field_of_the_configuration_has_an_option_and_a_description(
    struct: type[msgspec.Struct],
) -> None:
    parser = parser_of(struct)
    actions = {action.dest: action for action in parser._actions}
    for field in msgspec.structs.fields(struct):
        action = actions[field.name]
        assert action.help
        option = "--" + field.name.replace("_", "-")
        if action.nargs == 0:
            words, value = [option], "True"
        else:
            kinds: dict[Any, str] = {"INT": "7", "FLOAT": "0.5", "JSON": "{}"}
            choices = action.choices
            value = choices[0] if isinstance(choices, tuple) else kinds.get(action.metavar, "x")
            words = [option, value]
        given = given_options(parser.parse_args(words), struct)
        [got] = given.values()
        assert str(got[0] if isinstance(got, tuple) else got) == value
        assert given.keys() == {field.name}


@pytest.mark.parametrize("struct", [EngineConfig, ServerConfig])
def test_every_field_is_in_a_group_of_the_help(struct: type[msgspec.Struct]) -> None:
    parser = parser_of(struct)
    titles = {
        action.dest: group.title
        for group in parser._action_groups
        for action in group._group_actions
    }
    assert {titles[name] for name in struct.__struct_fields__} <= set(GROUPS)


def test_a_command_has_defaults_of_its_own() -> None:
    parser = parser_of(Example, defaults={"a_number": 9})
    assert "half is 50% (default: 9)" in " ".join(parser.format_help().split())
    assert config_from_args(parser.parse_args([]), Example) == Example(a_number=9)
    assert config_from_args(parser.parse_args(["--a-number", "4"]), Example) == Example(a_number=4)


def test_sampling_options_override_the_models_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    own = SamplingParams(temperature=0.6, top_k=20)
    assert sampling_params(parser.parse_args([]), own) is None
    args = parser.parse_args(["--top-k", "5", "--stop", "a", "--stop", "b", "--max-tokens", "9"])
    assert sampling_params(args, own) == SamplingParams(
        temperature=0.6, top_k=5, stop=("a", "b"), max_tokens=9
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "'fly' is not one of serve, chat,"),
        (["serev"], "did you mean serve?"),
        (["bench", "ofline"], "did you mean offline?"),
        (["--verson"], "unknown option --verson; did you mean --version?"),
        (["serve", "--port", "x"], "--port: invalid int value"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["serve", "--port", "70000"], "--port must be at most 65,535, not 70000"),
        (["serve", "--max-num-seq", "1"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max_num_seq=1"], "--max_num_seq; did you mean --max-num-seqs?"),
        (["serve", "-p", "1"], "unknown option -p"),
        (["serve", "--policy", "fari"], "--policy: 'fari' is not one of fair,"),
        (["serve", "--policy", "fari"], "did you mean fair?"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "a", "--model", "b"], "the model is named twice, as 'b' and as 'a'"),
        (["kernels", "build", "a", "--model", "b"], "different models are named"),
        (["chat", "--top-p", "2"], "--top-p must be"),
        (["chat", "--url", "http://x", "--dtype", "float32"], "--dtype: the server at --url"),
        (["generate", "a.txt", "-o", "b.jsonl", "--page-size", "0"], "--page-size must be"),
        (["generate", "a.jsonl", "-o", "./a.jsonl"], "would replace the prompts"),
        (["generate", "--outpt", "b.jsonl", "a.txt"], "did you mean --output?"),
        (["generate", "some/model", "-o", "b.jsonl"], "the order is [MODEL] FILE"),
        (["generate", "a.txt", "some/model", "-o", "b.jsonl"], "the order is [MODEL] FILE"),
    ],
)
def test_wrong_usage_leaves_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    error, advice = capsys.readouterr().err.splitlines()
    assert message in error
    assert "--help" in advice


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "/nowhere/a.txt", "-o", "/nowhere/b.jsonl"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("asyncllm: error: ")
    assert "/nowhere/a.txt" in line


def test_errors_of_loading_name_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = ModelError("max_model_len 9 is too long: at most kv_cache_tokens=5 and a_name")
    monkeypatch.setattr(
        "asyncllm.cli.commands.replay.run", lambda args: (_ for _ in ()).throw(problem)
    )
    assert main(["replay", "x"]) == 1
    assert "--max-model-len 9 is too long: at most --kv-cache-tokens=5 and a_name" in (
        capsys.readouterr().err
    )


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    """As with ``asyncllm models | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "asyncllm", "models"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "shown"), [([], "asyncllm chat  "), (["bench"], "offline"), (["kernels"], "build")]
)
def test_without_a_command_there_is_help(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    assert shown in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"asyncllm {__version__}\n"


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = """
import sys
from asyncllm.__main__ import main
try:
    main(["serve", "--help"])
finally:
    heavy = {"torch", "aiohttp", "tokenizers", "jinja2", "numpy", "rich"} & sys.modules.keys()
    assert not heavy, heavy
    others = ("asyncllm.lab.bench", "asyncllm.lab.replay")
    assert not [name for name in sys.modules if name.startswith(others)]
"""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--kv-cache-tokens" in done.stdout
    assert time.perf_counter() - started < 3  # 0.2 s on an idle machine


def test_an_interruption_while_a_command_is_imported_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncllm.__main__.import_module", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


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
