"""The decoder families with a mixture of experts, and what others override."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, TypeVar

from torch import nn

from asyncllm.models.config.base import MoeConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.moe import Experts, SparseMoE, TokenGate
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import Router, SoftmaxRouter
from asyncllm.parallel.ranks import Apart

C = TypeVar("C", bound=MoeConfig)


class MoeDecoderLM(DecoderLM[C]):
    """A decoder with experts or, in the layers that config.json names, one MLP.

    Attributes:
        fuses_shared_expert: gate and up of the shared expert are one matrix in the checkpoint.
        has_shared_gate: the output of the shared expert is weighted for each token.
        renamed: parts of names in the checkpoint, and what they are called here.
    """

    fuses_shared_expert = False
    has_shared_gate = False
    renamed: ClassVar[dict[str, str]] = {}

    def make_mlp(self, config: C, layer: int, place: Placement) -> nn.Module:
        if not config.is_sparse(layer):
            return super().make_mlp(config, layer, place)
        hidden, act = config.hidden_size, config.activation
        shared = None
        if (size := config.shared_expert_size) > 0:
            fused = self.fuses_shared_expert
            unsummed = replace(place, ranks=Apart(place.ranks.rank, place.ranks.size))
            shared = GatedMLP(hidden, size, act, unsummed, fused_on_disk=fused)
        return SparseMoE(
            self.make_router(config, place),
            self.make_experts(config, place),
            place,
            shared=shared,
            shared_gate=TokenGate(hidden, place) if shared and self.has_shared_gate else None,
        )

    def make_experts(self, config: C, place: Placement) -> Experts:
        """The experts of a sparse layer."""
        sizes = config.experts, config.hidden_size, config.expert_size
        return Experts(*sizes, config.activation, place)

    def make_router(self, config: C, place: Placement) -> Router:
        """The router of a sparse layer."""
        return SoftmaxRouter(
            config.hidden_size,
            config.experts,
            place,
            top_k=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
        )

    def checkpoint_name(self, name: str) -> str | None:
        for stored, own in self.renamed.items():
            name = name.replace(stored, own)
        return super().checkpoint_name(name)
