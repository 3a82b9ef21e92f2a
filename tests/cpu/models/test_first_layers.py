"""A model with its first layers only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncllm.models.base import CausalLM
from asyncllm.models.first_layers import first_layers, layer_kinds
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from tests.support.models import tiny_models


def make(family: str, folder: Path, **config: int) -> CausalLM:
    spec = read_spec(tiny_models.make(family, folder, **config))
    return make_model(spec, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("family", ["llama", "opt", "olmoe"])
def test_three_of_many_that_are_alike(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, num_hidden_layers=9)
    short = first_layers(model)
    assert len(layer_kinds(short)) == len(short.attention_specs) == 3
    # The model itself stays as it is.
    assert len(layer_kinds(model)) == 9
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is own for name, own in short.named_parameters())


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("gemma3", 8),  # five of six have a window
        ("smollm3", 6),  # every fourth has no positions
        ("glm4_moe", 4),  # the first has no experts
    ],
)
def test_every_kind_of_layer_is_there(family: str, layers: int, tmp_path: Path) -> None:
    model = make(family, tmp_path, num_hidden_layers=12)
    short = first_layers(model)
    assert set(layer_kinds(short)) == set(layer_kinds(model))
    assert len(layer_kinds(short)) == layers


def test_a_model_of_few_layers_stays_whole(tmp_path: Path) -> None:
    model = make("llama", tmp_path, num_hidden_layers=3)
    assert first_layers(model) is model
