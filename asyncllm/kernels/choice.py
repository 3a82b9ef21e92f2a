"""Two sets of kernels for the same computations. A model gets one of them when it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from torch import Tensor

from asyncllm.kernels.experts import mix_experts, ordered_mix_experts
from asyncllm.kernels.linear import (
    gated_linear,
    linear,
    linear_with_rest,
    ordered_gated_linear,
    ordered_linear,
    ordered_linear_with_rest,
)
from asyncllm.kernels.quantized import Fp8Rows
from asyncllm.kernels.recurrent.delta import gated_delta_net, ordered_delta_net
from asyncllm.kernels.recurrent.mamba import mamba, ordered_mamba


class Kernels(NamedTuple):
    """What layers launch; see the functions of these names."""

    linear: Callable[..., Tensor]
    linear_with_rest: Callable[..., tuple[Tensor, Tensor]]
    gated_linear: Callable[..., Tensor | Fp8Rows]
    mix_experts: Callable[..., Tensor]
    gated_delta_net: Callable[..., Tensor]
    mamba: Callable[..., Tensor]


#: What takes the least time for the rows of a step. The last bits of a row depend on the others.
FASTEST: Final = Kernels(
    linear, linear_with_rest, gated_linear, mix_experts, gated_delta_net, mamba
)
#: On a GPU, each row has the same bits in any batch: every sum has one order.
ORDERED: Final = Kernels(
    ordered_linear,
    ordered_linear_with_rest,
    ordered_gated_linear,
    ordered_mix_experts,
    ordered_delta_net,
    ordered_mamba,
)
