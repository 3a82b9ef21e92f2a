"""What the kernels of experts' products are given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asyncllm.kernels.triton.experts.routing import Groups
from asyncllm.kernels.types import ExpertWeight, Fp8Matrix, GatedExperts, Int4Matrix, Mxfp4Matrix


class Product(NamedTuple):
    """What is multiplied.

    Attributes:
        out: first product: [rows, inner], in the order of the groups; second one: what each choice
            adds to its token, [tokens * top_k, hidden].
        x: [tokens, hidden], or [rows, inner].
        bias: [experts, N], or None.
        factors: None, or the weights of choices, [tokens, top_k].
        act: of the first product: ``act``, ``paired``, ``alpha`` and ``limit`` of ``GatedExperts``.
    """

    out: Tensor
    x: Tensor
    weight: ExpertWeight
    bias: Tensor | None
    factors: Tensor | None
    groups: Groups
    top_k: int
    act: tuple[str | None, bool, float, float]

    @classmethod
    def first(
        cls, out: Tensor, x: Tensor, experts: GatedExperts, groups: Groups, top_k: int
    ) -> Product:
        """Inner features of tokens."""
        act = (experts.act, experts.paired, experts.alpha, experts.limit)
        return cls(out, x, experts.gate_up, experts.gate_up_bias, None, groups, top_k, act)

    @classmethod
    def second(
        cls, out: Tensor, inner: Tensor, experts: GatedExperts, groups: Groups, weights: Tensor
    ) -> Product:
        """What inner features add to tokens."""
        act = (None, False, 1.0, 0.0)
        top_k = weights.shape[1]
        return cls(out, inner, experts.down, experts.down_bias, weights, groups, top_k, act)

    @property
    def size(self) -> int:
        """Rows of an expert's matrix."""
        return self.out.shape[1] * (1 if self.act[0] is None else 2)


def parts(weight: ExpertWeight) -> tuple[Tensor, Tensor | None, Tensor | None, str, int]:
    """Codes, scales and zero points of a weight, its format, and columns of a group."""
    if isinstance(weight, Fp8Matrix):
        form = "fp8_blocks" if weight.is_blocked else "fp8_rows"
        return weight.data, weight.scale, None, form, 0
    if isinstance(weight, Mxfp4Matrix):
        return weight.packed, weight.scale, None, "mxfp4", 0
    if isinstance(weight, Int4Matrix):
        return weight.packed, weight.scale, weight.zero, "int4", weight.group
    return weight, None, None, "dense", 0
