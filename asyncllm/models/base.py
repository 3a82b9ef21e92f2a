"""The interface of models for the executor and the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.errors import ModelError
from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.layers.embedding import OutputProjection
from asyncllm.models.layers.moe import SparseMoE
from asyncllm.models.layers.parameter import Packed, Placement, Stored
from asyncllm.models.quant.place import Place
from asyncllm.models.quant.weight import QuantizedWeight
from asyncllm.models.state import StateShape


class DraftHead(Protocol):
    """A layer that drafts tokens from what the model found out about those before.

    Attributes:
        spec: this rank's attention of the layer, whose number comes after those of the model.
        reads: the hidden states that it reads: those after so many layers of the model, rising.
        size: elements of one of its own states.
    """

    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...

    def features(self, read: list[Tensor]) -> Tensor:
        """One state of each token, [tokens, hidden], from those that it reads."""

    def predict(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """States from which the tokens after ``batch.input_ids`` are drafted.

        Args:
            batch: its tokens are those after the tokens of ``hidden``, its positions these tokens'.
            hidden: [tokens, hidden]; ``features``, or what ``carried`` returned. It may be
                overwritten.

        Returns:
            [samples, hidden].
        """

    def drafts(self, states: Tensor) -> Tensor:
        """The likeliest tokens, int64 [n], of states from ``predict``."""

    def carried(self, states: Tensor) -> Tensor:
        """What ``predict`` takes to draft one token more after states that it returned."""


class Checkpointed(nn.Module):
    """A module whose parameters are tensors of a checkpoint."""

    def checkpoint_tensors(self) -> dict[str, Place]:
        """The place of each tensor, by name: views that together cover all parameters."""
        places: dict[str, Place] = {}
        own: Iterable[tuple[str, Place]]
        for path, module in self.named_modules():
            if isinstance(module, QuantizedWeight):
                continue  # a part of its projection
            if isinstance(module, Packed):
                path = path.rpartition(".")[0]
            if isinstance(module, Stored):
                own = module.parts()
            else:
                own = module.named_parameters(recurse=False)
            places.update((f"{path}.{name}", place) for name, place in own)
        return places


class CausalLM(Checkpointed, ABC):
    """A decoder-only language model that computes in the dtype of its weights.

    ``cls(config, place, max_length)`` allocates a rank's parameters without filling them. Positions
    stay below ``max_length``, by default the checkpoint's own limit.

    Attributes:
        attention_specs: of each layer with attention, in order, with this rank's heads.
        states: what this rank keeps of a sequence in each recurrent layer, by layer.
        lm_head: the output projection; None if it is the token embedding.
        head: drafts tokens; None if that was not asked for.
    """

    attention_specs: list[AttentionSpec]
    states: Mapping[int, StateShape] = MappingProxyType({})
    lm_head: OutputProjection | None

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.head: DraftHead | None = None

    @property
    def cached_specs(self) -> list[AttentionSpec]:
        """Of everything that has K and V: the layers, and the head."""
        return (
            self.attention_specs if self.head is None else [*self.attention_specs, self.head.spec]
        )

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of this rank's K and V of one token, for a dtype of that size."""
        return sum(spec.kv_size for spec in self.cached_specs) * itemsize

    @property
    def num_layers(self) -> int:
        """Layers with attention or a recurrent state."""
        return len(self.attention_specs) + len(self.states)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of this rank's recurrent state of one sequence, for a dtype of that size."""
        return sum(state.num_bytes(itemsize) for state in self.states.values())

    def weights_per_token(self) -> int:
        """This rank's weights that one token is multiplied with: of experts, those it chooses."""
        count = 0
        for module in self.modules():
            if isinstance(module, QuantizedWeight):
                count += module.shape.numel()
            else:
                count += sum(weight.numel() for weight in module.parameters(recurse=False))
            if isinstance(module, SparseMoE):
                count -= module.unused_weights()
        return count

    def add_predictor(self, place: Placement) -> None:
        """Allocate the layer that predicts one more token; see ``models.predicting``.

        Raises:
            ModelError: checkpoints of this family have none.
        """
        raise ModelError(f"{type(self).__name__} has no layer that predicts further tokens (MTP)")

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one step; returns [samples, hidden] for ``logits``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [samples, hidden] -> [samples, vocab], in the same dtype.

        Every rank has all of them.
        """

    @abstractmethod
    def final(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to the output of ``forward``: [n, hidden] -> [n, hidden]."""

    def checkpoint_name(self, name: str) -> str | None:
        """This class's name for a tensor of the checkpoint; None if it is not used."""
        tied = name == "lm_head.weight" and self.lm_head is None
        return None if tied or name.endswith("rotary_emb.inv_freq") else name
