"""``asyncllm models``: every family, and what one model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm import demo
from asyncllm.__main__ import main
from asyncllm.models.registry import ARCHITECTURES, FAMILIES
from tests.support.models.configs import QWEN3_30B_A3B, config_folder


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for family in FAMILIES:
        assert any(line.startswith(f"{family.title} ") for line in lines)
    assert all(name in printed for name in ARCHITECTURES)
    assert "GPTQ" in printed


def test_a_model_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(demo.path())]) == 0
    printed = capsys.readouterr().out
    for words in ("Qwen3 (Qwen3ForCausalLM)", "2,048 tokens", "3 KiB a token"):
        assert words in printed


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "mxfp4"}, "stored as mxfp4 (17.2 GiB)"),
        ({"quant_method": "fp8"}, "stored as fp8 (29.0 GiB)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "stored as awq (15.7 GiB)"),
    ],
)
def test_quantised_weights_are_smaller(
    quantization: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_folder(tmp_path, QWEN3_30B_A3B, quantization_config=quantization)
    assert main(["models", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert words in printed
    assert "56.9 GiB in 16 bits" in printed


def test_a_model_that_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert main(["models", str(tmp_path)]) == 1
    assert "recurrent" in capsys.readouterr().err
