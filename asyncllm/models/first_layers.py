"""The first layers of a model that has many alike."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import TypeVar

from torch import nn

from asyncllm.models.base import CausalLM
from asyncllm.models.config.base import DecoderConfig

M = TypeVar("M", bound=nn.Module)


def layer_kinds(model: CausalLM) -> list[Hashable]:
    """The kind of each layer: two of a kind launch the same kernels, on tensors of equal shapes."""
    config = getattr(model, "config", None)
    attentions = {spec.layer: spec for spec in model.attention_specs}
    return [
        (
            attentions[number].kind if number in attentions else model.states.get(number),
            config.rope(number) if isinstance(config, DecoderConfig) else None,
            *(type(module) for module in layer.modules()),
            *((name, parameter.shape) for name, parameter in layer.named_parameters()),
        )
        for number, layer in enumerate(_layers(model)[1])
    ]


def first_layers(model: CausalLM) -> CausalLM:
    """As few layers, from the first on, as have every kind and two more; shares all parameters.

    Layers run one after the other, so a step of the result takes as much memory as one of the whole
    model. The last layer computes less than the others.
    """
    kinds = layer_kinds(model)
    count = max(map(kinds.index, kinds)) + 3
    if count >= len(kinds):
        return model
    path, layers = _layers(model)
    short = _copied(model)
    short.attention_specs = [spec for spec in model.attention_specs if spec.layer < count]
    short.states = {layer: state for layer, state in model.states.items() if layer < count}
    inner: nn.Module = short
    *parents, name = path.split(".")
    for parent in parents:
        child = _copied(inner.get_submodule(parent))
        setattr(inner, parent, child)
        inner = child
    setattr(inner, name, layers[:count])
    return short


def _layers(model: CausalLM) -> tuple[str, nn.ModuleList]:
    """The list of all layers, and its path in the model."""
    count = model.num_layers
    return next(
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )


def _copied(module: M) -> M:
    """Another module with the same parts."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
