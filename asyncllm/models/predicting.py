"""Layers that predict further tokens (multi-token prediction), which drafts are made with."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.base import MoeConfig
from asyncllm.models.decoder import MoeDecoderLM, attention_spec
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import MakeNorm
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.parameter import Placement

M = TypeVar("M", bound=MoeConfig)


class Predictor(nn.Module):
    """Joins what the model found out about each token with the token after it, and has one more
    layer. Embedding and output projection are the model's.

    Args:
        layer: a block with attention.
        project: from two hidden states to one.
        spec: this rank's attention of the layer, whose number comes after those of the model.
    """

    def __init__(
        self, layer: nn.Module, project: nn.Module, make_norm: MakeNorm, spec: AttentionSpec
    ):
        super().__init__()
        self.embedding_norm = make_norm()
        self.hidden_norm = make_norm()
        self.project = project
        self.layer = layer
        self.norm = make_norm()
        self.spec = spec

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: Tensor | None, batch: ForwardBatch
    ) -> Tensor:
        """[tokens, hidden] of each -> the same, before ``norm``."""
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=1)
        out: Tensor = self.layer(self.project(joined), rope, batch)
        return out


class _PredictorHead:
    """``DraftHead`` of a model with a predictor."""

    def __init__(self, model: PredictingLM[Any], spec: AttentionSpec):
        self._model = model
        self.spec = spec
        self.reads = (model.config.num_hidden_layers,)
        self.size = model.config.hidden_size

    def features(self, read: list[Tensor]) -> Tensor:
        return self._model.final(*read)

    def predict(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        return self._model.predict(batch, hidden)

    def drafts(self, states: Tensor) -> Tensor:
        return self._model.predicted_logits(states).argmax(dim=1)

    def carried(self, states: Tensor) -> Tensor:
        return self._model.carried(states)


class PredictingLM(MoeDecoderLM[M]):
    """A decoder whose checkpoints may have a ``Predictor``.

    It is loaded only if it is asked for (``ModelSpec.predicts_ahead``). Where a checkpoint has
    several, the first one is used.

    Attributes:
        predictor: None if it was not asked for.
        predictor_names: what names of its tensors begin with, and what they are called here; None:
            the model has that already, or it belongs to another predictor. The first one holds.
        carries_normed: further predictions are made from states after the predictor's last norm.
    """

    predictor_names: ClassVar[dict[str, str | None]]
    carries_normed = False

    def __init__(self, config: M, place: Placement, max_length: int | None = None):
        super().__init__(config, place, max_length)
        self.predictor: Predictor | None = None

    def add_predictor(self, place: Placement) -> None:
        config, like = self.config, self._like()
        spec = attention_spec(config, like)
        attention = self.make_attention(config, spec, place)
        assert isinstance(attention, Attention)
        own = replace(self.attention_specs[0], layer=config.num_hidden_layers)
        attention.spec = own
        make_norm = partial(self.make_norm, config, config.hidden_size, place)
        mlp = self.make_mlp(config, self.predictor_mlp(), place)
        block = self.make_block(config, attention, mlp, make_norm, place)
        project = Linear(2 * config.hidden_size, config.hidden_size, place)
        self.predictor = Predictor(block, project, make_norm, own)
        self.head = _PredictorHead(self, own)

    def predict(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """States from which the tokens after ``batch.input_ids`` are predicted.

        Args:
            batch: its tokens are those after the tokens of ``hidden``, its positions these tokens'.
            hidden: [tokens, hidden]; ``final`` of the model's states, or what ``carried`` returned.

        Returns:
            [samples, hidden].
        """
        assert self.predictor is not None
        embedded = self.model.embed_tokens(batch.input_ids)
        states = self.predictor(embedded, hidden, self.model.ropes[self._like()], batch)
        return states if batch.logit_rows_only else batch.sampling(states)

    def predicted_logits(self, states: Tensor) -> Tensor:
        """As ``logits``, of states from ``predict``."""
        assert self.predictor is not None
        return self.scores(*self.predictor.norm.before_projection(states))

    def carried(self, states: Tensor) -> Tensor:
        """What ``predict`` takes to predict one token more after states that it returned."""
        assert self.predictor is not None
        return self.predictor.norm(states) if self.carries_normed else states

    @abstractmethod
    def predictor_mlp(self) -> int:
        """The number of a layer that has an MLP, or experts, as the predictor has."""

    @abstractmethod
    def predictor_part(self, name: str) -> str | None:
        """What a name of a tensor of a predictor ends with; None if it is the model's."""

    def checkpoint_name(self, name: str) -> str | None:
        part = self.predictor_part(name)
        if part is None:
            return super().checkpoint_name(name)
        if self.predictor is None:
            return None
        for stored, own in self.predictor_names.items():
            if part.startswith(stored):
                if own is None:
                    return None
                part = own + part.removeprefix(stored)
                break
        return super().checkpoint_name(f"predictor.{part}")

    def _like(self) -> int:
        """The number of a layer that attends as the predictor does."""
        return self.attention_specs[0].layer
