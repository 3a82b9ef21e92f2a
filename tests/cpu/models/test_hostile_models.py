"""Folders that are broken, or made to harm, are refused with one line, at once and for nothing."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.errors import ModelError
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.text.model_files import read_json
from tests.support.models import tiny_models
from tests.support.models.tiny_models import edit_config


def load(folder: Path) -> None:
    load_model(folder, read_spec(folder), torch.float32, "cpu")


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return tiny_models.make("qwen3_moe", tmp_path / "moe", max_shard_size=50_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10_000_000),
        ("vocab_size", 2**40),
        ("hidden_size", 2**40),
        ("num_attention_heads", 2**40),
        ("num_key_value_heads", 2**40),
        ("head_dim", 2**40),
        ("num_experts", 2**40),
        ("max_position_embeddings", 2**40),
        ("num_hidden_layers", 10**30),
    ],
)
def test_sizes_that_no_model_has(field: str, value: int, moe: Path) -> None:
    edit_config(moe, **{field: value})
    assert_refused(moe, "config.json", field)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 1000, "layer_types": None}, ["num_hidden_layers 1000", "3 layers"]),
        ({"num_experts": 4096}, ["num_experts 4096", "8 experts"]),
        ({"vocab_size": 2**24}, ["expected [16777216, 64]"]),
        ({"moe_intermediate_size": 2**20}, ["1048576"]),
    ],
)
def test_a_config_of_a_larger_model_takes_no_memory(
    changes: dict[str, Any], words: list[str], moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Placement.empty

    def empty(place: Placement, *shape: int) -> torch.nn.Parameter:
        assert place.device.type == "meta", "memory was taken"
        return allocate(place, *shape)

    monkeypatch.setattr(Placement, "empty", empty)
    edit_config(moe, **changes)
    assert_refused(moe, *words)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1,", "3", "1" * 10_000])
def test_json_that_cannot_be_read(text: str, moe: Path) -> None:
    (moe / "config.json").write_text(text)
    assert_refused(moe, "config.json")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(moe / "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": [3]},
        {"partial_rotary_factor": "much"},
        {"rope_scaling": {"full_attention": 3}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": []}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": [1]}},
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
    ],
)
def test_settings_of_the_wrong_form(changes: dict[str, Any], moe: Path) -> None:
    edit_config(moe, **changes)
    assert_refused(moe, "config.json")


NAMES = [
    "../outside.safetensors",
    "/etc/passwd",
    "sub/a.safetensors",
    "",
    ".",
    "..",
    "a\0b",
    "a\nb",
]


@pytest.mark.parametrize("name", NAMES)
def test_shards_stay_in_their_folder(name: str, moe: Path) -> None:
    """Even where the file is there and would fit."""
    index = moe / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = min(content["weight_map"].values())
    (moe.parent / "outside.safetensors").write_bytes((moe / first).read_bytes())
    (moe / "sub").mkdir()
    (moe / "sub" / "a.safetensors").write_bytes((moe / first).read_bytes())
    renamed = {key: name if file == first else file for key, file in content["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": renamed}))
    assert_refused(moe, str(index), "not the name of a file")


def test_links_into_the_cache_of_the_hub_work(moe: Path) -> None:
    blobs = moe.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(moe.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))
    load(moe)


def test_random_damage_to_a_header(moe: Path) -> None:
    """Never anything but a ModelError of one line; sometimes nothing that matters is hit."""
    chance = random.Random(0)
    file = min(moe.glob("*.safetensors"))
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for _ in range(200):
        file.write_bytes(_damaged(whole, length, chance))
        message = ""
        try:
            load(moe)
        except ModelError as error:
            message = str(error)
        assert "\n" not in message
    file.write_bytes(whole)
    load(moe)


def _damaged(whole: bytes, length: int, chance: random.Random) -> bytes:
    match chance.randrange(4):
        case 0:
            return whole[: chance.randrange(len(whole))]
        case 1:
            lengths = [0, 1, 2**31, 2**63, 2**64 - 1, length - 1, length + 1]
            return struct.pack("<Q", chance.choice(lengths)) + whole[8:]
        case 2:
            changed = bytearray(whole)
            for _ in range(chance.randint(1, 20)):
                changed[chance.randrange(length + 8)] = chance.randrange(256)
            return bytes(changed)
    header = json.loads(whole[8 : 8 + length])
    tensor = header[chance.choice([name for name in header if name != "__metadata__"])]
    damage: dict[str, list[Any]] = {
        "dtype": ["F4", "F8_E5M2", "BOOL", "I8", "X", None, 3],
        "shape": [[], [0], [-1], [2**63], [2**32, 2**32], [1.5], None, "x"],
        "data_offsets": [[0, 0], [-1, 5], [5, 1], [0, 2**63], [0], None],
    }
    field = chance.choice(list(damage))
    tensor[field] = chance.choice(damage[field])
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + whole[8 + length :]
