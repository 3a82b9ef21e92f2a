"""Which models' kernels are found by running two layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from asyncllm.startup.kernel_discovery import shortened
from tests.support.models import tiny_models


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", 2),
        ("ministral3", 2),
        ("smollm3", 4),  # one layer has no positions
        ("olmo3", 4),  # windows
        ("glm4_moe", 3),  # a layer without experts
    ],
)
def test_layers_that_are_alike_run_once(family: str, layers: int, tmp_path: Path) -> None:
    spec = read_spec(tiny_models.make(family, tmp_path))
    model = make_model(spec, torch.bfloat16, torch.device("meta"))
    assert shortened(spec, model).num_layers == layers
