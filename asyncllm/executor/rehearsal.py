"""Which Triton kernels serving a model launches, found by running its steps without a GPU.

Model, tables and buffers are those of serving, on the meta device, where a tensor has a shape and
no contents. So what is found are the variants that serving launches, if it is told the same sizes;
one layer stands for all where they are alike.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.paged import PagedBackend
from asyncllm.config import EngineConfig
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.eager import EagerForward
from asyncllm.executor.inputs import StepRows
from asyncllm.executor.kv_pool import KVPool
from asyncllm.executor.memory import step_tokens, wanted_length
from asyncllm.executor.programs import StepPrograms, captured_tokens
from asyncllm.executor.sampler import Level, Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.kernels.prebuild import Gpu, Variant, rehearsing
from asyncllm.models.base import CausalLM
from asyncllm.models.loader import make_model
from asyncllm.models.quant.allocate import can_keep
from asyncllm.models.spec import ModelSpec
from asyncllm.wire.messages import Admit, RowParams, pack

#: Steps that are launched kernel by kernel: the tokens of each row.
_EAGER = (
    *((1,) * 2, (1,) * 3, (1,) * 16),
    *((5,), (16,), (1000,), (1024,), (3000,), (8000,)),
    *((7, 300), (1, 1, 700), (1, 2000, 3000), (64,) * 16),
)
_PARAMS = {
    Level.GREEDY: RowParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, 0, ()),
    Level.DRAW: RowParams(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, 0, ()),
    Level.FILTER: RowParams(1.0, 50, 0.9, 0.1, 0.0, 0.0, 1.0, 0, -1, 0, ()),
    Level.EAGER: RowParams(1.0, 50, 0.9, 0.1, 0.5, 0.5, 1.1, 0, 5, 99, (0,)),
}


def find_variants(
    spec: ModelSpec, dtype: torch.dtype, config: EngineConfig, gpu: Gpu
) -> list[Variant]:
    """Every variant that serving the model on that GPU launches, as far as it can be foreseen.

    Args:
        config: lengths and sizes that serving will be given.

    Raises:
        ModelError: the model is not supported, or not with this configuration.
    """
    with rehearsing(gpu) as variants:
        run_steps(spec, dtype, config)
    return variants


def run_steps(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> None:
    """Run steps of every size that is captured, and some of those that are not, on no device."""
    device = _Nowhere()
    meta = device.torch_device
    length, page_size = wanted_length(config, spec), config.page_size
    keep = spec.quantization is not None and can_keep(torch.device("cuda"), dtype)
    whole = make_model(spec, dtype, meta, length, keep=keep)
    max_tokens = min(step_tokens(config, "cuda"), captured_tokens(whole))
    spec = _shortened(spec, whole)
    model = make_model(spec, dtype, meta, length, keep=keep)
    pool = KVPool(spec.num_layers, 1, page_size, spec.num_kv_heads, spec.head_dim, dtype, meta)
    sampler = Sampler(config.max_num_seqs, spec.vocab_size, meta)
    table = SlotTable(config.max_num_seqs, -(-length // page_size), device)
    backend = PagedBackend(pool)
    backend.warm_up(model.attention_specs, dtype, meta)
    programs = StepPrograms(model, backend, table, page_size, config.max_num_seqs, max_tokens)
    for size in programs.decode_sizes + programs.mixed_sizes:
        flat = torch.empty(programs.num_ints(size), dtype=torch.int32, device=meta)
        logits, rows = programs.run(size, flat)
        for level in (Level.GREEDY, Level.DRAW, Level.FILTER):
            sampler.draw(logits, rows.slots, rows.lengths, level, relay=table.last_token)
    eager = EagerForward(model, backend, sampler, table, page_size, device)
    for q_lens in _EAGER:
        if len(q_lens) <= config.max_num_seqs and max(q_lens) < length:
            for params in _PARAMS.values():
                eager(_admitted(q_lens, params, table, sampler))


def _shortened(spec: ModelSpec, model: CausalLM) -> ModelSpec:
    """With a single layer, if all layers of the model are alike."""
    count = len(model.attention_specs)
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    layers = next(lists, None)
    if layers is None:
        return spec
    kinds = {
        (
            replace(attention, layer=0),
            *(type(module) for module in layer.modules()),
            *((name, parameter.shape) for name, parameter in layer.named_parameters()),
        )
        for attention, layer in zip(model.attention_specs, layers, strict=True)
    }
    if len(kinds) > 1:
        return spec
    config = msgspec.structs.replace(spec.config, num_hidden_layers=1)
    return msgspec.structs.replace(spec, num_layers=1, config=config)


def _admitted(
    q_lens: tuple[int, ...], params: RowParams, table: SlotTable, sampler: Sampler
) -> StepRows:
    """A step of whole prompts of these lengths."""
    for slot, q_len in enumerate(q_lens):
        tokens = table.admit(Admit(slot, pack([0] * q_len), q_len, params))
        sampler.admit(slot, params, tokens, q_len)
    rows = [(slot, 0, q_len) for slot, q_len in enumerate(q_lens)]
    return StepRows.of(np.array(rows, dtype=np.int32), table)


class _Nowhere(CpuDevice):
    """A device that keeps shapes only."""

    def __init__(self) -> None:
        self.torch_device = torch.device("meta")

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device)

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        pass


__all__ = ["find_variants", "run_steps"]
