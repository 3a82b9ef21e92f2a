"""``asyncllm serve``: what is served how; and the bar while it loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.system.terminal import LOGGED_BYTES, LoadingBar


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the server was asked to serve, instead of serving it."""
    served: list[Any] = []

    def run(make_llm: Callable[[], AsyncLLM], config: ServerConfig, **_: Any) -> int:
        served.extend((make_llm().config, config))
        return 3

    monkeypatch.setattr("asyncllm.server.run.run", run)
    yield served
    logging.getLogger("asyncllm").setLevel(logging.NOTSET)


def test_defaults_serve_the_demo(served: list[Any]) -> None:
    assert main(["serve"]) == 3
    assert served == [EngineConfig(), ServerConfig()]


def test_options_of_both_sides(served: list[Any]) -> None:
    line = (
        "serve some/model --host 0.0.0.0 --port 0 --dtype float16 --max-model-len 128 "
        "--kv-cache-tokens 1024 --max-num-seqs 8 --served-model-name a --served-model-name b "
        "--api-key k --load-format dummy --device cpu"
    )
    assert main(line.split()) == 3
    engine = EngineConfig(
        model="some/model",
        dtype="float16",
        max_model_len=128,
        kv_cache_tokens=1024,
        max_num_seqs=8,
        load_format="dummy",
        device="cpu",
    )
    server = ServerConfig(host="0.0.0.0", port=0, served_model_name=("a", "b"), api_key=("k",))
    assert served == [engine, server]


@pytest.mark.parametrize(("total", "drawn"), [(LOGGED_BYTES // 2, False), (LOGGED_BYTES * 2, True)])
def test_the_loading_bar_is_for_large_models(
    total: int, drawn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = LoadingBar()
    bar(0, total)
    bar(total, total)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("loading 100%" in captured.err) is drawn


def test_a_standby_needs_a_parent(capsys: pytest.CaptureFixture[str], served: list[Any]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--standby", "--no-supervise"])
    assert "--standby needs the parent process" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tls-cert a --tls-key b", "--tls-cert: with --dp above 1"),
        ("--no-supervise", "--no-supervise: replicas"),
        ("--standby", "--standby: only for a single server"),
    ],
)
def test_what_replicas_cannot_do(
    options: str, message: str, capsys: pytest.CaptureFixture[str], served: list[Any]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(f"serve --dp 2 {options}".split())
    assert message in capsys.readouterr().err
    assert not served
