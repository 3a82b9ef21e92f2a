"""EAGLE-3 heads: their config.json, as SGLang's and vLLM's checkpoints have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.config.base import DecoderConfig, Layers, Size, VocabSize
from asyncllm.models.config.llama import LlamaConfig
from asyncllm.text.model_files import read_json

#: Names that ``architectures`` has: of flat files, and of those with ``transformer_layer_config``.
_ARCHITECTURES: Final = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3"),
    *("Eagle3Speculator", "Eagle3DraftModel"),
)
#: Switches of checkpoints that are computed otherwise.
_UNSUPPORTED: Final = ("norm_before_fc", "fc_norm", "norm_output")


class _Nested(msgspec.Struct, frozen=True):
    """Settings beside those of the layer, in either layout."""

    architectures: tuple[str, ...] = ()
    draft_vocab_size: VocabSize | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    eagle_config: dict[str, Any] | None = None
    transformer_layer_config: dict[str, Any] | None = None


class Eagle3Config(msgspec.Struct, frozen=True):
    """The settings of a head (Li et al., EAGLE-3, 2025).

    Attributes:
        folder: of its config.json and weights.
        layer: of its only layer, and its vocabulary of input tokens.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: of the model that it drafts for.
        reads: the hidden states that it reads: those after so many layers of the model.
        norm_before_residual: what the layer adds to is the normed state.
    """

    folder: Path
    layer: LlamaConfig
    draft_vocab_size: VocabSize
    target_hidden_size: Size
    reads: tuple[Layers, ...]
    norm_before_residual: bool


def read_eagle3(folder: Path, target: DecoderConfig) -> Eagle3Config:
    """Read the config.json of a head for a model of these settings.

    Raises:
        ModelError: it is missing or broken, or the head is not one for this model; the message
            names the file and what is wrong in it.
    """
    path = folder / "config.json"
    raw = read_json(path, required=True)
    try:
        given = msgspec.convert(raw, _Nested)
        _check_kind(given, raw)
        layer = msgspec.convert(given.transformer_layer_config or raw, LlamaConfig)
        config = _config(folder, given, layer, target)
        _check(config, target)
    except (msgspec.ValidationError, ModelError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: {error}", param="speculative_config") from None
    return config


def _check_kind(given: _Nested, raw: dict[str, Any]) -> None:
    name = given.architectures[0] if given.architectures else "nothing"
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"'architectures' has {name}, which is no EAGLE-3 head ({known} are)")
    inner = given.eagle_config or {}
    for switch in _UNSUPPORTED:
        if raw.get(switch) or inner.get(switch):
            raise ModelError(f"EAGLE-3 heads with {switch} are not supported")
    if inner.get("use_aux_hidden_state") is False:
        raise ModelError("EAGLE-3 heads without use_aux_hidden_state are not supported")


def _config(
    folder: Path, given: _Nested, layer: LlamaConfig, target: DecoderConfig
) -> Eagle3Config:
    return Eagle3Config(
        folder,
        layer,
        given.draft_vocab_size or layer.vocab_size,
        given.target_hidden_size or target.hidden_size,
        _reads(given, target.num_hidden_layers),
        given.norm_before_residual,
    )


def _reads(given: _Nested, num_layers: int) -> tuple[int, ...]:
    """``Eagle3Config.reads``: ids at the top count layers before, ids in ``eagle_config`` name the
    layer after which the state is read."""
    inner = (given.eagle_config or {}).get("eagle_aux_hidden_state_layer_ids")
    if given.eagle_aux_hidden_state_layer_ids:
        return given.eagle_aux_hidden_state_layer_ids
    if inner:
        return tuple(layer + 1 for layer in msgspec.convert(inner, tuple[int, ...]))
    return 2, num_layers // 2, num_layers - 3


def _check(config: Eagle3Config, target: DecoderConfig) -> None:
    layer = config.layer
    if layer.num_hidden_layers != 1:
        raise ModelError(f"num_hidden_layers is {layer.num_hidden_layers}; only 1 is supported")
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"the head is for a model with hidden_size {config.target_hidden_size}, but the "
            f"model's is {target.hidden_size}"
        )
    if layer.vocab_size > target.vocab_size or config.draft_vocab_size > layer.vocab_size:
        raise ModelError(
            f"draft_vocab_size {config.draft_vocab_size} and vocab_size {layer.vocab_size} must "
            f"not exceed the model's vocab_size, {target.vocab_size}"
        )
    last, reads = target.num_hidden_layers, config.reads
    rise = list(reads) == sorted(set(reads))
    if len(reads) != 3 or not rise or not all(0 <= count <= last for count in reads):
        raise ModelError(
            f"eagle_aux_hidden_state_layer_ids: the head reads states after {reads} layers; three "
            f"rising numbers are needed, of a model of {last} layers"
        )
