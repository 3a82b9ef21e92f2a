"""Where sampling values come from that requests leave out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, demo
from asyncllm.errors import ModelError

RECOMMENDED = {"do_sample": False, "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("source", "overrides", "temperature", "top_k"),
    [
        ("auto", None, 0.0, 20),
        ("none", None, 1.0, 0),
        ("auto", {"temperature": 0.5}, 0.5, 20),
        ("none", {"temperature": 0.5}, 0.5, 0),
        ("auto", {"top_k": 5}, 0.0, 5),
        ("auto", {"top_k": None}, 0.0, 0),
        ("auto", {"do_sample": True}, 0.6, 20),
        ("auto", {"do_sample": False, "temperature": 0.5}, 0.0, 20),
        ("folder", None, 0.25, 0),
        ("folder", {"top_k": 3}, 0.25, 3),
    ],
)
async def test_defaults_of_sampling(
    source: str, overrides: dict[str, Any] | None, temperature: float, top_k: int, tmp_path: Path
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(demo.path(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    other.mkdir()
    (model / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    (other / "generation_config.json").write_text('{"temperature": 0.25}')
    options: dict[str, Any] = {
        "generation_config": str(other) if source == "folder" else source,
        "override_generation_config": overrides,
    }
    async with AsyncLLM(model, device="sim", **options) as llm:
        assert (llm.default_params.temperature, llm.default_params.top_k) == (temperature, top_k)


async def test_a_folder_without_defaults_of_sampling(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        await AsyncLLM(device="sim", generation_config=str(tmp_path)).start()
