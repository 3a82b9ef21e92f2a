"""EAGLE-3 heads of checkpoints in both layouts, against the published equations."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, HiddenStates
from asyncllm.errors import ModelError
from asyncllm.models.base import CausalLM
from asyncllm.models.config.base import DecoderConfig
from asyncllm.models.eagle3_config import read_eagle3
from asyncllm.models.loading.draft_head import load_with_head
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Ranks
from tests.support.models import eagle3, tiny_models
from tests.support.models.dense_attention import DenseBackend
from tests.support.parallel.threads import run_ranks, same_everywhere

LENGTH = 40
LAYOUTS: dict[str, dict[str, Any]] = {
    "SGLang's": {"reads": (1, 2, 4)},
    "pytorch_model.bin": {"as_torch": True, "reads": (1, 2, 3)},
    "nested": {
        "nested": True,
        "own_embedding": True,
        "reads": (0, 2, 3),
        "norm_before_residual": True,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny_models.make("llama", folder, num_hidden_layers=4)


def load(target: Path, folder: Path, ranks: Ranks | None = None) -> CausalLM:
    spec = read_spec(target)
    assert isinstance(spec.config, DecoderConfig)
    spec = replace(spec, eagle3=read_eagle3(folder, spec.config))
    cpu = torch.device("cpu")
    return load_with_head(target, spec, torch.float32, cpu, max_length=128, ranks=ranks)


def reference(target: Path, folder: Path) -> eagle3.Reference:
    stored = folder / "model.safetensors"
    tensors = load_file(stored) if stored.exists() else torch.load(folder / "pytorch_model.bin")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    before = json.loads((folder / "config.json").read_text()).get("norm_before_residual", False)
    return eagle3.Reference(tensors, embedding, before)


def batch_of(backend: DenseBackend, rows: list[tuple[int, int, Tensor]]) -> ForwardBatch:
    """Of rows (slot, start, ids)."""
    shape = np.array([(slot, start, len(ids)) for slot, start, ids in rows], dtype=np.int32)
    return ForwardBatch(
        torch.cat([ids for *_, ids in rows]),
        torch.cat([torch.arange(at, at + len(ids)) for _, at, ids in rows]),
        torch.empty(0),
        sample_rows=None,
        backend=backend,
        plan=backend.plan(shape, torch.empty(0)),
    )


def run_head(
    model: CausalLM, backend: DenseBackend, rows: list[tuple[int, int, Tensor, Tensor]]
) -> Tensor:
    """For rows (slot, start, ids, hidden): states of all tokens."""
    assert model.head is not None
    batch = batch_of(backend, [row[:3] for row in rows])
    with torch.inference_mode():
        return model.head.predict(batch, torch.cat([row[3] for row in rows]))


def read_states(model: CausalLM, ids: Tensor) -> list[Tensor]:
    assert model.head is not None
    batch = batch_of(DenseBackend(), [(0, 0, ids)])
    batch.hidden = HiddenStates(model.head.reads)
    with torch.inference_mode():
        model(batch)
    return batch.hidden.kept


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts(layout: str, target: Path, tmp_path: Path) -> None:
    """At once, in chunks beside another sequence, and three tokens ahead."""
    settings = LAYOUTS[layout]
    folder = eagle3.write(tmp_path / "head", **settings)
    plain, model = reference(target, folder), load(target, folder)
    assert model.head is not None
    assert model.cached_specs[-1].layer == 4
    ids = torch.randint(4, 384, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    # As transformers counts: the states after so many layers, without the last norm.
    inner = tiny_models.reference(target).model
    norm, inner.norm = inner.norm, torch.nn.Identity()
    with torch.no_grad():
        after = inner(ids[None, :LENGTH], output_hidden_states=True).hidden_states
    inner.norm = norm
    read = read_states(model, ids[:LENGTH])
    for got, count in zip(read, settings["reads"], strict=True):
        near(got, after[count][0])

    features = plain.features(read)
    near(model.head.features(read), features)
    scores, states = plain.step(ids[1:], features)
    got = run_head(model, DenseBackend(), [(0, 0, ids[1:], features.clone())])
    near(got, states)
    assert torch.equal(model.head.drafts(got), scores.argmax(1))

    backend, parts = DenseBackend(), []
    for start, end in pairwise([0, 1, 16, 17, LENGTH]):
        here = slice(start, end)
        other = (1, start, ids[here], -features[here])
        both = run_head(model, backend, [other, (0, start, ids[1:][here], features[here].clone())])
        parts.append(both[end - start :])
    near(torch.cat(parts), states)
    states, found = parts[-1][-1:], []
    for ahead in range(3):
        found.append(int(model.head.drafts(states)))
        row = 0, LENGTH + ahead, torch.tensor(found[-1:]), model.head.carried(states)
        states = run_head(model, backend, [row])
    assert found == plain.drafts(ids.tolist(), read, 3)


def test_ranks_draft_together(target: Path, tmp_path: Path) -> None:
    folder = eagle3.write(tmp_path / "head", reads=(1, 2, 3))
    ids = torch.arange(5, 15)
    read = read_states(load(target, folder), ids[:-1])
    wanted = reference(target, folder).step(ids[1:], reference(target, folder).features(read))[0]

    def drafts(ranks: Ranks) -> Tensor:
        model = load(target, folder, ranks)
        assert model.head is not None
        states = run_head(model, DenseBackend(), [(0, 0, ids[1:], model.head.features(read))])
        return model.head.drafts(states)

    assert torch.equal(same_everywhere(run_ranks(2, drafts)), wanted.argmax(1))


def test_by_default_it_reads_low_middle_and_high_states(tmp_path: Path) -> None:
    spec = read_spec(tiny_models.make("llama", tmp_path / "t", num_hidden_layers=8))
    config: Any = spec.config
    assert read_eagle3(eagle3.write(tmp_path / "head"), config).reads == (2, 4, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM, which is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; only 1"),
        ({"target_hidden_size": 128}, "a model with hidden_size 128, but the model's is 64"),
        ({"vocab_size": 4096}, "must not exceed the model's vocab_size, 384"),
        ({"draft_vocab_size": 385}, "draft_vocab_size 385"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "three rising numbers are needed"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "a model of 4 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "config.json: "),
        ({"norm_before_fc": True}, "norm_before_fc are not supported"),
        ({"hidden_act": "tanh"}, "'tanh' is not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    settings: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    folder = eagle3.write(tmp_path / "head", **settings)
    config: Any = read_spec(target).config
    with pytest.raises(ModelError, match=r"config\.json") as refused:
        read_eagle3(folder, config)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "missing 'fc.weight'"),
        ({"fc.weight": torch.zeros(64, 64)}, r"has shape \[64, 64\], expected \[64, 192\]"),
        ({"other.weight": torch.zeros(3)}, "unexpected 'other.weight'"),
        ({"d2t": None}, "has no tensor 'd2t'"),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, r"'d2t' is I64 \[7\], not I64 \[200\]"),
        ({"d2t": torch.full((200,), 300)}, "leads to ids beyond 384"),
    ],
)
def test_a_broken_checkpoint_is_refused(
    change: dict[str, Tensor | None], message: str, target: Path, tmp_path: Path
) -> None:
    folder = eagle3.write(tmp_path / "head", reads=(1, 2, 3))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(target, folder)


def test_models_without_states_of_all_tokens_are_refused(tmp_path: Path) -> None:
    target = tiny_models.make("opt", tmp_path / "opt")
    config: Any = read_spec(tiny_models.make("llama", tmp_path / "llama")).config
    head = read_eagle3(eagle3.write(tmp_path / "head", reads=(0, 1, 2)), config)
    with pytest.raises(ModelError, match="cannot draft for OPTForCausalLM"):
        load_with_head(
            target, replace(read_spec(target), eagle3=head), torch.float32, torch.device("cpu")
        )
