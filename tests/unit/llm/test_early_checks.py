"""Errors of a start come before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.llm import load
from asyncllm.llm.load import check_early
from asyncllm.models.spec import read_spec

#: Starts engines one after the other, and prints their errors and what was imported by then.
PROGRAM: Final = """
import asyncio, json, sys, time
from asyncllm import AsyncLLM
for options in json.loads(sys.argv[1]):
    begun = time.perf_counter()
    try:
        asyncio.run(AsyncLLM(**options).start())
    except Exception as error:
        loaded = [name for name in ("torch", "transformers", "triton") if name in sys.modules]
        print(json.dumps([str(error), loaded, time.perf_counter() - begun]))
"""


def broken(folder: Path, *, without: str = "", **contents: str) -> str:
    """A copy of the demo model without a file, or with others."""
    shutil.copytree(demo.path(), folder)
    for file in folder.glob(f"{without}*" if without else "no such file"):
        file.unlink()
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "my-model").mkdir()
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4976698672\n"
    unknown = '{"architectures": ["NoSuchForCausalLM"]}'
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": str(tmp_path / "my-modle")}, "did you mean " + str(tmp_path / "my-model")),
        ({"model": str(tmp_path / "my-model")}, "it has no config.json"),
        ({"model": str(tmp_path / "model.gguf")}, "GGUF files"),
        ({"model": "org/Some-7B-GGUF"}, "GGUF files"),
        ({"model": "asyncllm-dmeo"}, "did you mean asyncllm-demo"),
        ({"model": broken(tmp_path / "1", config__json=unknown)}, "NoSuchForCausalLM"),
        ({"model": broken(tmp_path / "2", without="tokenizer")}, "no tokenizer"),
        ({"model": broken(tmp_path / "3", without="model")}, "has no weights"),
        ({"model": broken(tmp_path / "4", model__safetensors=lfs)}, "git lfs pull"),
        ({"model": broken(tmp_path / "5", model__safetensors="x" * 100)}, "is damaged"),
        ({"device": "cuda:99"}, "device cuda:99: this machine has"),
        ({"device": "cuda:98", "dp": 2}, "device cuda:98: this machine has"),
        ({"device": "cpu", "attention": "triton"}, "it needs a CUDA device"),
        ({"tool_parser": "hermse"}, "did you mean hermes?"),
        ({"reasoning_parser": "thnik"}, "did you mean think?"),
        ({"max_model_len": 10**6}, "more than the 2048 positions"),
        ({"quantization": "gptq"}, "not quantised"),
        ({"trace": "/no/such/folder/x"}, "cannot be written"),
        ({"tokenizer": str(tmp_path / "nothing")}, "there is no folder"),
        ({"draft": str(tmp_path / "nothing")}, "the head that drafts: there is no folder"),
        # It comes before a model, which may have to be downloaded.
        (
            {"model": str(tmp_path / "nothing"), "draft": ""},
            "the head that drafts: the name of a model is empty",
        ),
        ({"model": " "}, "the name of a model is empty"),
        ({"chat_template": str(tmp_path / "nothing")}, "cannot read chat_template"),
    ]
    options = [{"device": "cpu", **given} for given, _ in cases]
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr
    for (given, expected), (message, loaded, seconds) in zip(cases, found, strict=True):
        assert expected in message, given
        assert loaded == [], given
        assert seconds < 5, given  # some milliseconds on an idle machine


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"device": "cuda"}, 0, "this machine has no CUDA device"),
        ({"device": "cuda:1"}, 1, "this machine has 1 CUDA device, from cuda:0 on"),
        ({"device": "cuda", "tp": 4}, 2, "2 CUDA devices, from cuda:0 on and 4 are needed"),
        ({"device": "cuda", "attention": "triton"}, 1, None),
        ({"device": "cuda", "tp": 2, "dp": 2}, 4, None),
        ({"device": "auto", "tp": 2}, 0, None),  # on the CPU
        ({"device": "auto", "attention": "flashinfer"}, 0, "it needs a CUDA device"),
        ({"device": "auto", "attention": "flashinfer"}, 1, None),
        ({"device": "sim", "attention": "flashinfer"}, 0, None),
        ({"device": "sim", "max_model_len": 100_000}, 0, None),
    ],
)
def test_gpus_are_counted_by_their_driver(
    given: dict[str, Any], gpus: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "count_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = demo.path()
    checked = EngineConfig(**given), folder, folder, read_spec(folder)
    if message is None:
        check_early(*checked)
        return
    with pytest.raises(ModelError, match=message):
        check_early(*checked)


def test_a_share_of_the_gpus_is_enough_on_each_of_several_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "count_gpus", lambda: 8)
    folder = demo.path()
    config = EngineConfig(device="cuda", tp=16)
    check_early(config, folder, folder, read_spec(folder), num_machines=2)
    with pytest.raises(ModelError, match="16 are needed"):
        check_early(config, folder, folder, read_spec(folder))
