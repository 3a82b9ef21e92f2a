"""Checkpoints that are ``pytorch_model.bin``, as the original OPT models are."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import LLM, SamplingParams
from asyncllm.errors import ModelError
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.checkpoint import TorchFile
from asyncllm.models.loading.loader import load_model
from asyncllm.models.loading.weight_stream import Reading, WeightStream
from asyncllm.models.spec import read_spec
from tests.cpu.models.test_loader import _MEASURE, _make_large
from tests.support.models import tiny_models


def load(folder: Path) -> CausalLM:
    return load_model(folder, read_spec(folder), torch.float32, "cpu")


def take_weights(folder: Path) -> dict[str, Tensor]:
    """Those of a folder, which has none afterwards."""
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        file.unlink()
    return weights


def assert_same(model: CausalLM, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", tiny_models.REPRESENTATIVE)
@pytest.mark.parametrize("zipped", [True, False])
def test_one_file(family: str, zipped: bool, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path)
    expected = load(folder).state_dict()
    file = folder / "pytorch_model.bin"
    torch.save(take_weights(folder), file, _use_new_zipfile_serialization=zipped)
    assert_same(load(folder), expected)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_original_opt(prefix: str, tmp_path: Path) -> None:
    """Names without the wrapper's prefix, and an output projection that shares the embedding."""
    folder = tiny_models.make("opt", tmp_path, dtype=torch.float16)
    expected = load(folder).state_dict()
    weights = {
        prefix + name.removeprefix("model."): tensor
        for name, tensor in take_weights(folder).items()
    }
    weights["lm_head.weight"] = weights[f"{prefix}decoder.embed_tokens.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    assert_same(load(folder), expected)


def test_shards(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_moe", tmp_path)
    expected = load(folder).state_dict()
    weights = sorted(take_weights(folder).items())
    weight_map: dict[str, str] = {}
    for number in range(3):
        part, name = dict(weights[number::3]), f"pytorch_model-0000{number + 1}-of-00003.bin"
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(load(folder), expected)


def test_tensors_that_are_not_contiguous_or_share_memory(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    expected = load(folder).state_dict()
    weights = take_weights(folder)
    both = torch.cat([weights["model.embed_tokens.weight"], weights["lm_head.weight"]])
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = both.chunk(2)
    query = "model.layers.0.self_attn.q_proj.weight"
    weights[query] = weights[query].T.contiguous().T
    torch.save(weights, folder / "pytorch_model.bin")
    seen: list[tuple[int, int]] = []
    spec = read_spec(folder)
    model = load_model(folder, spec, torch.float32, "cpu", progress=lambda *done: seen.append(done))
    assert_same(model, expected)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_safetensors_come_first(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    expected = load(folder).state_dict()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert_same(load(folder), expected)


def test_it_generates(tmp_path: Path) -> None:
    folder = tiny_models.make("opt", tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "tokenizer": _demo(), "kv_cache_tokens": 1024}
    with LLM(folder, **options) as llm:
        expected = llm.generate([5, 6, 7], params).token_ids
    torch.save(take_weights(folder), folder / "pytorch_model.bin")
    with LLM(folder, **options) as llm:
        assert llm.generate([5, 6, 7], params).token_ids == expected


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("code of a stranger has run",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"PK\x03\x04" + b"\0" * 1000,
        b"<html>Too many requests</html>",
        pickle.dumps(_Evil()),
        pickle.dumps({"a": 1}),
        b"\x80\x02" + b"(" * 100_000,
    ],
)
def test_files_that_are_refused(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.make("opt", tmp_path)
    take_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    capfd.readouterr()
    _assert_refused(folder)
    assert "stranger" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(1)],
        {"model": {"a": torch.ones(1)}},
        {1: torch.ones(1)},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.ones(2, device="meta")},
        _Evil(),
    ],
)
def test_other_contents_are_refused(content: Any, tmp_path: Path) -> None:
    folder = tiny_models.make("opt", tmp_path)
    take_weights(folder)
    torch.save(content, folder / "pytorch_model.bin")
    _assert_refused(folder)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_files(keep: float, zipped: bool, tmp_path: Path) -> None:
    folder = tiny_models.make("opt", tmp_path)
    file = folder / "pytorch_model.bin"
    torch.save(take_weights(folder), file, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    _assert_refused(folder)


def test_mapped_tensors_are_streamed(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(50, 70),
        "half": torch.randn(3, 3100).half(),
        "one": torch.ones(1),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    places = {name: torch.full_like(tensor.float(), torch.nan) for name, tensor in tensors.items()}
    with (
        TorchFile(tmp_path / "pytorch_model.bin") as file,
        WeightStream(torch.device("cpu"), Reading(2, 4096)) as stream,
    ):
        assert sum(stream.copy_mapped(dict(file.items()), places)) == 14_000 + 18_600 + 4
    for name, place in places.items():
        assert torch.equal(place, tensors[name].float()), name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    """The file is mapped: its pages are the kernel's, which takes them back when it needs them."""
    folder = _make_large(tmp_path)
    torch.save(take_weights(folder), folder / "pytorch_model.bin")
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=True
    )
    for line in run.stdout.splitlines():
        size, peak = map(int, line.split())
        assert peak < 1.1 * size


def _assert_refused(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "pytorch_model.bin" in str(caught.value)
    assert "\n" not in str(caught.value)


def _demo() -> str:
    from asyncllm import demo

    return str(demo.path())
