"""Parts of layers that keep a recurrent state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.recurrent.convolution import short_convolution
from asyncllm.kernels.types import Norm
from asyncllm.kernels.types.recurrent import LayerState, StateRows
from asyncllm.models.layers.linear import FusedLinear, Kept, RowLinear
from asyncllm.models.layers.parameter import Packed, Placement, Stored
from asyncllm.models.quant.place import Place
from asyncllm.models.state import StateShape


class RecurrentLayer(nn.Module, ABC):
    """Takes the place of ``Attention`` in a block.

    Attributes:
        state: what this rank keeps of one sequence.
    """

    state: StateShape

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See ``Attention.forward``; ``rope`` is None."""


class ShortConvolution(Stored):
    """The weights of ``kernels.recurrent.convolution``.

    Args:
        channels: this rank's.
        width: tokens that it sees.
    """

    def __init__(self, channels: Kept, width: int, place: Placement, *, bias: bool = False):
        super().__init__()
        self.channels = channels
        self.weight = place.empty(channels.size, width)
        self.bias = place.empty(channels.size) if bias else None

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.channels.place(0, self.weight.unsqueeze(1))
        if self.bias is not None:
            yield "bias", self.channels.place(0, self.bias)


class HeadNumbers(Packed):
    """Parameters of one float32 number for each head.

    Args:
        heads: this rank's.
        names: in the checkpoint.
    """

    def __init__(self, heads: Kept, names: tuple[str, ...], place: Placement):
        super().__init__()
        self.heads = heads
        for name in names:
            setattr(self, name, replace(place, dtype=torch.float32).empty(heads.size))

    def __getitem__(self, name: str) -> Tensor:
        values: Tensor = self.get_parameter(name)
        return values

    def parts(self) -> Iterator[tuple[str, Place]]:
        for name, values in self.named_parameters():
            yield name, self.heads.place(0, values)


class GatedConvolution(RecurrentLayer):
    """LFM2's: three projections B, C and x of the input, and C times the convolution of B x.

    Args:
        layer: its number.
        width: tokens that the convolution sees.
    """

    def __init__(self, size: int, width: int, layer: int, place: Placement, *, bias: bool):
        super().__init__()
        own = Kept.share(size, "hidden_size", place.ranks)
        self.layer = layer
        self.in_proj = FusedLinear(size, {"in_proj": Kept.of(own, own, own)}, place, bias=bias)
        self.conv1d = ShortConvolution(own, width, place, bias=bias)
        self.out_proj = RowLinear(own, size, place, bias=bias)
        self.state = StateShape(own.size, width)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        before, after, inner = self.in_proj(x, norm=norm).chunk(3, dim=1)
        weight, bias = self.conv1d.weight, self.conv1d.bias

        def mix(inputs: tuple[Tensor, ...], state: LayerState, rows: StateRows) -> Tensor:
            (gated,) = inputs
            return short_convolution(gated, weight, bias, state.inputs, rows, silu=False)

        mixed = batch.recur(self.layer, mix, before * inner)
        out: Tensor = self.out_proj(batch.needed(after * mixed), residual=residual)
        return out
