"""``--config FILE``: options from a file, below those of the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.llm.async_llm import AsyncLLM

FILES = {
    "c.yaml": "model: org/m\nmax-num-seqs: 8\napi_key: [a, b]\nprefix_caching: no\n"
    "itl-target-ms: 5\n",
    "c.toml": 'model = "org/m"\nmax-num-seqs = 8\napi_key = ["a", "b"]\nprefix_caching = false\n'
    "itl-target-ms = 5\n",
    "c.json": '{"model": "org/m", "max-num-seqs": 8, "api_key": ["a", "b"], "itl-target-ms": 5, '
    '"prefix_caching": false}',
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    served: list[Any] = []

    def run(make_llm: Callable[[], AsyncLLM], config: ServerConfig, **_: Any) -> int:
        served[:] = [make_llm().config, config]
        return 0

    monkeypatch.setattr("asyncllm.server.run.run", run)
    yield served
    logging.getLogger("asyncllm").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_options_and_the_command_line_overrides_them(
    name: str, served: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(FILES[name])
    expected = EngineConfig(model="org/m", max_num_seqs=8, prefix_caching=False, itl_target_ms=5.0)
    assert main(["serve", "--config", str(file)]) == 0
    assert served == [expected, ServerConfig(api_key=("a", "b"))]
    line = ["serve", "other", "--config", str(file), "--max-num-seqs", "3", "--api-key", "c"]
    assert main([*line, "--prefix-caching"]) == 0
    assert served == [
        EngineConfig(model="other", max_num_seqs=3, itl_target_ms=5.0),
        ServerConfig(api_key=("c",)),
    ]


def test_one_file_serves_all_commands(
    monkeypatch: pytest.MonkeyPatch, served: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\napi-key: one\nmax-num-seqs: 8\npolicy: fcfs\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert served[1] == ServerConfig(port=1, api_key=("one",))
    seen: list[EngineConfig] = []

    def llm(*, config: EngineConfig, **_: Any) -> Any:
        seen.append(config)
        raise OSError("no more is needed")

    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", llm)
    (tmp_path / "p.txt").write_text("one")
    line = ["generate", str(tmp_path / "p.txt"), "-o", str(tmp_path / "o.jsonl")]
    assert main([*line, "--config", str(file)]) == 1
    # Over the command's own defaults, too.
    assert seen == [EngineConfig(max_num_seqs=8, policy="fcfs", itl_target_ms=0.0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "c.yaml",
            "max-num-seq: 8",
            "c.yaml: unknown key 'max-num-seq'; did you mean max-num-seqs?",
        ),
        ("c.yaml", "temperature: 0", "c.yaml: unknown key 'temperature'"),
        ("c.yaml", "run: x", "c.yaml: unknown key 'run'"),
        ("c.yaml", "max-num-seqs: many", "c.yaml: --max-num-seqs: Expected `int`, got `str`"),
        ("c.yaml", "max-num-seqs: 0", "c.yaml: --max-num-seqs must be at least 1"),
        ("c.yaml", "a: [", "c.yaml: "),
        ("c.yaml", "- a", "must hold options"),
        ("c.toml", "a: 1", "c.toml: "),
        ("c.txt", "", "c.txt: the name must end in .yaml"),
        ("c.json", None, "c.json: No such file"),
    ],
)
def test_a_bad_file_is_a_usage_error(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["serve", "--config", str(file)])
    assert left.value.code == 2
    error, _ = capsys.readouterr().err.splitlines()
    assert message in error


def test_sampling_options_where_there_are_such(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("top-p: 2\n")
    for command in ("chat", "generate p.txt -o o.jsonl"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--config", str(file)])
