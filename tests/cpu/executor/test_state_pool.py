"""Recurrent states: whose slots they are, and what is copied between them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.families.qwen3_next import Qwen3_5ForCausalLM
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.models.state import StateShape
from tests.support.models import tiny_models
from tests.support.models.dense_attention import DenseBackend, step

SHAPES = {1: StateShape(6, 3, 2, 4, 5), 4: StateShape(8, 2)}


def pool() -> StatePool:
    return StatePool(SHAPES, 5, torch.bfloat16, "cpu")


def test_layers_have_views_of_every_slot() -> None:
    states = pool()
    first, second = states.layer(1), states.layer(4)
    assert first.inputs.shape == (6, 3, 6)
    assert first.matrices is not None
    assert first.matrices.shape == (6, 2, 4, 5)
    assert first.matrices.dtype == torch.float32
    assert second.inputs.shape == (6, 2, 8)
    assert second.matrices is None
    first.inputs.fill_(1.0)
    assert int((states.inputs != 0).sum()) == 6 * 3 * 6
    used = states.inputs[0].nbytes + states.matrices[0].nbytes
    assert used == sum(shape.num_bytes(2) for shape in SHAPES.values())


def test_copies_happen_in_order() -> None:
    states = pool()
    for slot in range(6):
        states.inputs[slot] = slot
        states.matrices[slot] = slot
    states.copy(np.array([(1, 2), (2, 3), (5, 2), (4, 1)], dtype=np.int32), torch.from_numpy)
    assert states.inputs[:, 0].tolist() == [0, 4, 5, 1, 4, 5]
    assert states.matrices[:, -1].tolist() == [0, 4, 5, 1, 4, 5]
    states.copy(np.empty((0, 2), dtype=np.int32), torch.from_numpy)


def test_models_without_recurrent_layers_have_none() -> None:
    states = StatePool({}, 0, torch.float32, "cpu")
    assert states.inputs.numel() == states.matrices.numel() == 0
    assert states.of_step(np.array([(0, 0, 3)]), np.array([0]), torch.from_numpy) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3_5ForCausalLM:
    folder = tiny_models.make("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    loaded = load_model(folder, read_spec(folder), torch.float32, "cpu")
    assert isinstance(loaded, Qwen3_5ForCausalLM)
    return loaded


def test_a_sequence_that_starts_does_not_read_what_its_slot_has(model: Qwen3_5ForCausalLM) -> None:
    """A, then B in the slot of A, then A again."""
    first, second = list(range(10, 40)), list(range(300, 333))
    backend = DenseBackend()
    [expected] = step(model, backend, [(0, 0, first)])
    [other] = step(model, backend, [(0, 0, second)])
    [again] = step(model, backend, [(0, 0, first)])
    [alone] = step(model, DenseBackend(), [(0, 0, second)])
    assert torch.equal(again, expected)
    assert torch.equal(other, alone)


def test_cuts_anywhere_give_the_same_state(model: Qwen3_5ForCausalLM) -> None:
    ids = torch.randint(4, 384, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = DenseBackend()
    step(model, whole, [(0, 0, ids)])
    for cuts in ([0, 1, 150], [0, 63, 64, 65, 150], [0, 2, 130, 131, 149, 150]):
        backend = DenseBackend()
        for start, end in pairwise(cuts):
            step(model, backend, [(0, start, ids[start:end])])
        assert whole.pool is not None
        assert backend.pool is not None
        torch.testing.assert_close(backend.pool.matrices[1], whole.pool.matrices[1])
        torch.testing.assert_close(backend.pool.inputs[1], whole.pool.inputs[1])
