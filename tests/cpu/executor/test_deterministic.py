"""What --deterministic needs, and what a model is then built of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM
from asyncllm.attention.choose import own_backend
from asyncllm.attention.paged import OrderedBackend
from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor import choose_device
from asyncllm.executor.choose_device import chosen_attention, chosen_kernels
from asyncllm.kernels.choice import FASTEST, ORDERED
from asyncllm.kernels.gpu import Gpu
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from tests.support.models import quantized, tiny_models

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"device": "cpu"}, "deterministic"),
        ({"device": "sim"}, "deterministic"),
        ({"attention": "flashinfer"}, "attention"),
        ({"attention": "sdpa"}, "attention"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        EngineConfig(deterministic=True, **options)
    assert refused.value.param == field


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_it_does_not_fall_back_to_a_cpu() -> None:
    with pytest.raises(ModelError, match="deterministic needs a GPU"):
        LLM(deterministic=True)


@pytest.mark.parametrize(
    ("family", "capability", "message"),
    [
        ("qwen3", (9, 0), None),
        ("qwen3", (8, 0), None),
        ("fp8", (8, 9), "needs a Hopper GPU for weights in fp8"),
        ("fp8", (9, 0), None),
    ],
)
def test_models(
    family: str,
    capability: tuple[int, int],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose_device, "obstacle", lambda _: None)
    monkeypatch.setattr(choose_device, "gpu_of", lambda _: Gpu(capability, "any", 100))
    folder = tiny_models.make("qwen3", tmp_path)
    if family == "fp8":
        folder, _ = quantized.make("fp8-blocks", tmp_path / "fp8")
    spec = read_spec(folder)
    if message is None:
        choose_device.check_deterministic(spec, CUDA)
        return
    with pytest.raises(ModelError, match=message):
        choose_device.check_deterministic(spec, CUDA)


def kernels_of(model: Any) -> list[Any]:
    return [part.kernels for part in model.modules() if hasattr(part, "kernels")]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "glm4_moe", "qwen3_next", "granite_hybrid"])
def test_every_layer_has_the_kernels_of_one_order(family: str, tmp_path: Path) -> None:
    config = EngineConfig(deterministic=True)
    assert own_backend(chosen_attention(config)) is OrderedBackend
    spec, kernels = read_spec(tiny_models.make(family, tmp_path)), chosen_kernels(config)
    model = make_model(spec, torch.bfloat16, torch.device("meta"), kernels=kernels)
    found = kernels_of(model)
    assert len(found) > 4
    assert all(kernels is ORDERED for kernels in found)
    usual = make_model(spec, torch.bfloat16, torch.device("meta"))
    assert all(kernels is FASTEST for kernels in kernels_of(usual))
