"""What every model offers the executor and the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.parameter import Packed
from asyncllm.models.quant.weight import Place, QuantizedWeight


class CausalLM(nn.Module, ABC):
    """A decoder-only language model that computes in the dtype of its weights.

    Made as ``cls(config, dtype, device, max_length)``: parameters are allocated on the device and
    not written to; positions stay below ``max_length``, by default the checkpoint's own limit. With
    ``quantized=True`` the weights of projections are left to ``models.quant.allocate``.

    Attributes:
        attention_specs: of each layer, in order.
        lm_head: the output projection, or None where the token embedding serves as it.
    """

    attention_specs: list[AttentionSpec]
    lm_head: Linear | None

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run one step; [samples, hidden], as ``logits`` takes it."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [samples, hidden] -> [samples, vocab], in the same dtype."""

    @abstractmethod
    def final(self, hidden: Tensor) -> Tensor:
        """What ``forward`` returns, after the last norm: [n, hidden] -> [n, hidden]."""

    def checkpoint_name(self, name: str) -> str | None:
        """What this class calls a tensor of the checkpoint; None where it has no use for it."""
        tied = name == "lm_head.weight" and self.lm_head is None
        return None if tied or name.endswith("rotary_emb.inv_freq") else name

    def checkpoint_tensors(self) -> dict[str, Place]:
        """Where each tensor goes, by name: views that together are all the parameters."""
        places: dict[str, Place] = {}
        own: Iterable[tuple[str, Place]]
        for path, module in self.named_modules():
            if isinstance(module, QuantizedWeight):
                continue  # the projection that it is of has its parts
            if isinstance(module, Packed):
                path, own = path.rpartition(".")[0], module.parts()
            elif isinstance(module, Linear):
                own = module.parts()
            else:
                own = module.named_parameters(recurse=False)
            places.update((f"{path}.{name}", place) for name, place in own)
        return places
