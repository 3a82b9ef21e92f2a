"""The decoder families with a mixture of experts, and what others override."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from torch import nn

from asyncllm.kernels.types import Routing
from asyncllm.models.config.base import MoeConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import Router
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
        shared = None
        if config.shared_expert_size > 0:
            sizes = config.hidden_size, config.shared_expert_size
            apart = replace(place, ranks=Apart(place.ranks.rank, place.ranks.size))
            fused = self.fuses_shared_expert
            shared = partial(GatedMLP, *sizes, config.activation, apart, fused_on_disk=fused)
        router, experts = self.make_router(config, place), self.make_experts(config, place)
        return SparseMoE(router, experts, place, shared=shared)

    def make_experts(self, config: C, place: Placement) -> Experts:
        """The experts of a sparse layer."""
        return Experts(
            config.experts,
            config.hidden_size,
            config.expert_size,
            config.activation,
            place,
            shared=shared_experts(config),
            is_shared_fused=self.fuses_shared_expert,
        )

    def make_router(self, config: C, place: Placement) -> Router:
        """The router of a sparse layer."""
        return Router(config.hidden_size, config.experts, place, self.routing(config))

    def routing(self, config: C) -> Routing:
        """How tokens choose experts."""
        return Routing(
            config.num_experts_per_tok,
            "softmax",
            config.norm_topk_prob,
            shared=shared_experts(config),
            has_gate=self.has_shared_gate and config.shared_expert_size > 0,
        )

    def checkpoint_name(self, name: str) -> str | None:
        for stored, own in self.renamed.items():
            name = name.replace(stored, own)
        return super().checkpoint_name(name)


def shared_experts(config: MoeConfig) -> int:
    """How many experts the shared one is computed as; 0: it is an MLP beside them.

    Many more experts for every token would cost prompts more than an MLP does, as its rows need no
    grouping and no sum.
    """
    count, rest = divmod(config.shared_expert_size, config.expert_size)
    return count if rest == 0 and 2 * count <= config.num_experts_per_tok else 0
