"""Layers that predict further tokens against the published equations, on transformers' layers."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.attention.base import ForwardBatch
from asyncllm.errors import ModelError
from asyncllm.models.loading.loader import load_model
from asyncllm.models.predicting import PredictingLM
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Ranks
from tests.support.models import tiny_models
from tests.support.models.dense_attention import DenseBackend
from tests.support.parallel.threads import run_ranks, same_everywhere

#: Overrides, the layer that the predictor has the form of, and what its names begin with.
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "qwen3_5": ({}, 3, "mtp."),
    "qwen3_next": (
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [],
        },
        2,
        "mtp.",
    ),
    "glm4_moe": ({"num_nextn_predict_layers": 2}, 2, "model.layers.3."),
}
#: What this file calls the parts, and what checkpoints do.
NAMES = {
    "mtp.": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "model.layers.3.": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}
HIDDEN, LENGTH = 64, 70


class Reference:
    """The whole head in transformers' parts, and its checkpoint in a folder."""

    def __init__(self, family: str, folder: Path):
        overrides, like, prefix = CASES[family]
        tiny_models.make(family, folder, **overrides)
        self.model = tiny_models.reference(folder)
        self.layer = copy.deepcopy(self.model.model.layers[like])
        self.layer.self_attn.layer_idx = 0
        self.norms = [copy.deepcopy(self.model.model.norm) for _ in range(3)]
        self.project = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        for seed, part in enumerate([self.layer, *self.norms, self.project]):
            tiny_models.randomize(part, seed)
        parts = (*self.norms[:2], self.project, self.norms[2])
        *own, inner = NAMES[prefix]
        stored = load_file(folder / "model.safetensors")
        for name, part in zip(own, parts, strict=True):
            stored[f"{prefix}{name}.weight"] = part.weight.detach().clone()
        stored |= {f"{prefix}{inner}{n}": t for n, t in self._of_layer().items()}
        if prefix != "mtp.":  # as the model's, and those of a second predictor
            stored[f"{prefix}embed_tokens.weight"] = torch.zeros(384, HIDDEN)
            stored[f"{prefix}shared_head.head.weight"] = torch.zeros(384, HIDDEN)
            stored["model.layers.4.enorm.weight"] = torch.zeros(HIDDEN)
        else:
            stored["mtp.layers.1.input_layernorm.weight"] = torch.zeros(HIDDEN)
        save_file(stored, folder / "model.safetensors")

    def _of_layer(self) -> dict[str, Tensor]:
        """As in checkpoints, which have three matrices of each expert."""
        tensors = dict(self.layer.state_dict())
        if (both := tensors.pop("mlp.experts.gate_up_proj", None)) is not None:
            down = tensors.pop("mlp.experts.down_proj")
            for expert, pair in enumerate(both):
                gate, up = pair.chunk(2)
                for name, matrix in (("gate", gate), ("up", up), ("down", down[expert])):
                    tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = matrix
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Final states of the model, [tokens, hidden]."""
        found: Tensor = self.model.model(ids[None]).last_hidden_state[0]
        return found

    @torch.no_grad()
    def predict(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and states before the last norm."""
        embedded = self.model.model.embed_tokens(ids)
        joined = torch.cat((self.norms[0](embedded), self.norms[1](hidden)), dim=-1)
        x = self.project(joined)[None]
        at = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        rope = self.model.model.rotary_emb(x, at)
        out = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=at)
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return self.model.lm_head(self.norms[2](out)), out


def load(
    folder: Path, ranks: Ranks | None = None, *, predicts_ahead: bool = True
) -> PredictingLM[Any]:
    spec = msgspec.structs.replace(read_spec(folder), predicts_ahead=predicts_ahead)
    model = load_model(folder, spec, torch.float32, "cpu", ranks=ranks)
    assert isinstance(model, PredictingLM)
    return model


def step(
    model: PredictingLM[Any], backend: DenseBackend, rows: list[tuple[int, int, Tensor, Tensor]]
) -> Tensor:
    """Predict for rows (slot, start, ids, hidden): states of all tokens."""
    shape = np.array([(slot, start, len(ids)) for slot, start, ids, _ in rows], dtype=np.int32)
    batch = ForwardBatch(
        input_ids=torch.cat([ids for _, _, ids, _ in rows]),
        positions=torch.cat([torch.arange(at, at + len(ids)) for _, at, ids, _ in rows]),
        slot_mapping=torch.empty(0),
        sample_rows=None,
        backend=backend,
        plan=backend.plan(shape, torch.empty(0)),
        states=None,
    )
    with torch.inference_mode():
        return model.predict(batch, torch.cat([hidden for *_, hidden in rows]))


@pytest.mark.parametrize("family", CASES)
def test_predictions(family: str, tmp_path: Path) -> None:
    """At once, in chunks beside another sequence, and two tokens ahead."""
    reference = Reference(family, tmp_path)
    model = load(tmp_path)
    ids = torch.randint(4, 384, (LENGTH + 2,), generator=torch.Generator().manual_seed(0))
    hidden, following = reference.states(ids[:LENGTH]), ids[1 : LENGTH + 1]
    logits, states = reference.predict(following, hidden)
    got = step(model, DenseBackend(), [(0, 0, following, hidden)])
    near(got, states)
    near(model.predicted_logits(got), logits)

    backend, parts = DenseBackend(), []
    for start, end in pairwise([0, 1, 16, 17, 64, LENGTH]):
        here = slice(start, end)
        other = (1, start, ids[here], -hidden[here])
        both = step(model, backend, [other, (0, start, following[here], hidden[here])])
        parts.append(both[end - start :])
    near(torch.cat(parts), states)

    carried = reference.norms[2](states) if family != "glm4_moe" else states
    near(model.carried(got), carried)
    further, _ = reference.predict(ids[2 : LENGTH + 2], carried)
    again = step(model, DenseBackend(), [(0, 0, ids[2:], model.carried(got))])
    near(model.predicted_logits(again), further)


@pytest.mark.parametrize("family", CASES)
def test_ranks_predict_together(family: str, tmp_path: Path) -> None:
    reference = Reference(family, tmp_path)
    ids = torch.randint(4, 384, (9,), generator=torch.Generator().manual_seed(1))
    hidden = reference.states(ids[:8])
    logits, _ = reference.predict(ids[1:], hidden)

    def predict(ranks: Ranks) -> Tensor:
        model = load(tmp_path, ranks)
        states = step(model, DenseBackend(), [(0, 0, ids[1:], hidden)])
        return model.predicted_logits(states)

    near(same_everywhere(run_ranks(2, predict)), logits)


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CASES)
def test_they_cost_nothing_unless_asked_for(family: str, tmp_path: Path) -> None:
    Reference(family, tmp_path)
    model, asked = load(tmp_path, predicts_ahead=False), load(tmp_path)
    assert model.predictor is None
    assert asked.predictor is not None
    assert asked.predictor.spec.layer == model.config.num_hidden_layers
    more = sum(p.numel() for p in asked.predictor.parameters())
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, asked)]
    assert sizes[1] - sizes[0] == more > 2 * HIDDEN**2


def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_5", tmp_path / "qwen")
    with pytest.raises(ModelError, match="qwen has no layer that predicts further"):
        load(folder)
    folder = tiny_models.make("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match="LlamaForCausalLM has no layer that predicts further"):
        load(folder)
