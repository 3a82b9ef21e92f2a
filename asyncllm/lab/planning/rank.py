"""What one rank of a model has to hold, read and compute: from its layers, on the meta device."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch

from asyncllm.config import EngineConfig
from asyncllm.executor.choose_device import cache_dtype
from asyncllm.executor.memory.limits import step_tokens, wanted_length
from asyncllm.executor.sim.shape import (
    KERNELS_OF_EXPERTS,
    KERNELS_PER_LAYER,
    KERNELS_PER_STEP,
    Attention,
    Work,
)
from asyncllm.executor.step.padded_steps import captured_tokens
from asyncllm.kernels.gpu import Gpu
from asyncllm.models.base import CausalLM
from asyncllm.models.config.base import MoeConfig
from asyncllm.models.layers.embedding import Embedding, SharedEmbedding, TokenEmbedding
from asyncllm.models.layers.linear import RowLinear
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.loading.allocate import Kept, kernels_take
from asyncllm.models.loading.loader import make_model
from asyncllm.models.quant.weight import QuantizedWeight
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Apart


class RankModel(NamedTuple):
    """One rank's share of a model.

    Attributes:
        weight_bytes, table_bytes: of all its parameters, and of tables such as rotary angles.
        padded_bytes: of the parameters, those with which experts are padded; see ``Experts``.
        captured_tokens: of the largest mixed step that is captured; 0: none is.
        num_sums: how often a step adds up over the ranks, ``sum_bytes`` for each token.
        logit_bytes: of the logits of one row.
        kept: the weights that stay quantised.
    """

    spec: ModelSpec
    work: Work
    weight_bytes: int
    padded_bytes: int
    table_bytes: int
    captured_tokens: int
    num_sums: int
    sum_bytes: int
    logit_bytes: int
    kept: Kept


def torch_dtype(config: EngineConfig, gpu: Gpu) -> torch.dtype:
    """The type that the model computes in on that GPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if gpu.has_bfloat16 else torch.float16
    found: torch.dtype = getattr(torch, config.dtype)
    return found


def rank_model(config: EngineConfig, spec: ModelSpec, gpu: Gpu) -> RankModel:
    """The share of each of ``config.tp`` ranks; all have shares of the same size.

    Raises:
        ModelError: the model cannot be divided among so many ranks, or has fewer positions than
            ``max_model_len``; or the GPU cannot have such a KV cache.
    """
    dtype, length = torch_dtype(config, gpu), wanted_length(config, spec)
    ranks = Apart(0, config.tp)
    keep = kernels_take(spec.quantization, dtype, gpu)
    meta = torch.device("meta")
    model = make_model(spec, dtype, meta, length, keep=keep, ranks=ranks)
    captured = min(captured_tokens(model), step_tokens(config, "cuda")) if config.cuda_graphs else 0
    sums = sum(
        getattr(module, "ranks", None) is ranks and isinstance(module, RowLinear | SparseMoE)
        for module in model.modules()
    )
    embeddings = sum(isinstance(module, SharedEmbedding) for module in model.modules())
    return RankModel(
        spec=spec,
        work=work_of(model, spec, dtype.itemsize, cache_dtype(config, dtype, gpu).itemsize),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        padded_bytes=int(sum(_padded_bytes(m) for m in model.modules() if isinstance(m, Experts))),
        table_bytes=sum(table.nbytes for table in model.buffers()),
        captured_tokens=captured,
        num_sums=sums + embeddings if config.tp > 1 else 0,
        sum_bytes=spec.hidden_size * dtype.itemsize,
        logit_bytes=spec.vocab_size * dtype.itemsize,
        kept=keep,
    )


def _padded_bytes(experts: Experts) -> float:
    used = experts.inner.whole / experts.ranks.size / experts.padded
    return (1 - used) * sum(parameter.nbytes for parameter in experts.parameters())


class _Weights(NamedTuple):
    """Elements, and the bytes that they take."""

    elements: int = 0
    num_bytes: int = 0


def work_of(model: CausalLM, spec: ModelSpec, itemsize: int, kv_itemsize: int) -> Work:
    """What the steps of a model read and compute; see ``Shape.work``."""
    sizes: dict[str, _Weights] = {}
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    owners = {part: experts for experts in layers for part in experts.modules()}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() > 0]
        count, num_bytes = sum(p.numel() for p in own), sum(p.nbytes for p in own)
        if isinstance(module, QuantizedWeight):
            count = module.shape.numel()
        for kind, share in _shares(module, owners.get(module), model).items():
            found = sizes.get(kind, _Weights())
            sizes[kind] = _Weights(
                found.elements + int(count * share), found.num_bytes + int(num_bytes * share)
            )
    rest, head = sizes.get("rest", _Weights()), sizes.get("head", _Weights())
    experts = sizes.get("experts", _Weights())
    config = spec.config
    used = 0.0
    if isinstance(config, MoeConfig) and config.experts > 0:
        used = config.num_experts_per_tok / config.experts
    attention = (
        (spec.window, 2 * spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim)
        for spec in model.attention_specs
    )
    return Work(
        kernels=KERNELS_PER_LAYER * spec.num_layers
        + KERNELS_OF_EXPERTS * len(layers)
        + KERNELS_PER_STEP,
        weight_bytes=rest.num_bytes + head.num_bytes,
        expert_bytes=experts.num_bytes,
        token_expert_bytes=used * experts.num_bytes,
        kv_bytes=model.kv_bytes_per_token(kv_itemsize),
        state_bytes=model.state_bytes(itemsize),
        token_flops=2 * (rest.elements + used * experts.elements),
        sample_flops=2 * head.elements,
        attention=Attention.of(attention),
        kv_itemsize=kv_itemsize,
    )


def _shares(module: torch.nn.Module, owner: Experts | None, model: CausalLM) -> dict[str, Fraction]:
    """What a module's own weights are for, and in what shares; ``owner`` has them, if any has.

    Every token reads a shared expert, as it does all weights but those of experts.
    """
    if owner is None:
        return {_kind(module, model): Fraction(1)}
    shared = Fraction(owner.shared, owner.count)
    return {"experts": 1 - shared, "rest": shared}


def _kind(module: torch.nn.Module, model: CausalLM) -> str:
    """What a module's own weights are for: "head", a table's "rows", or "rest"."""
    if module is model.lm_head or (model.lm_head is None and isinstance(module, TokenEmbedding)):
        return "head"
    return "rows" if isinstance(module, Embedding) else "rest"
