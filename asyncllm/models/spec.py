"""The spec of a model, read from its folder without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models import registry
from asyncllm.models.config.base import Config
from asyncllm.models.eagle3_config import Eagle3Config
from asyncllm.models.quant.config import Quantization, parse_quantization, served_quantization
from asyncllm.models.wrong_files import about_folder
from asyncllm.text.model_files import read_json
from asyncllm.types.sampling_defaults import SamplingDefaults

T = TypeVar("T")

#: Two names of the rotary settings.
_ROPE_NAMES: Final = ("rope_scaling", "rope_parameters")
#: Errors of reading nested settings, which are not typed.
_WRONG_FORM: Final = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model that the engine needs.

    Attributes:
        architecture: as config.json names it.
        config: the family's settings, for its model class.
        max_position_embeddings: the longest sequence.
        eos_token_ids: those of generation_config.json, then those only config.json has.
        dtype: of the weights on disk, as config.json names it: "bfloat16", "float16", "float32".
        sampling: defaults for values that requests leave unset.
        quantization: of the weights on disk, or what is made of them; None: they are not quantised.
        predicts_ahead: the layer that predicts one more token (MTP) is loaded, too.
        eagle3: an EAGLE-3 head that is loaded, too.
    """

    architecture: str
    config: Config
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    sampling: SamplingDefaults
    quantization: Quantization | None = None
    predicts_ahead: bool = False
    eagle3: Eagle3Config | None = None

    @property
    def weight_format(self) -> str | None:
        """The format of quantised weights, such as "fp8"; None if they are not quantised."""
        return None if self.quantization is None else self.quantization.method

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token in all layers, for a dtype of that size."""
        config = self.config
        return itemsize * sum(
            2 * config.kv_heads(layer) * config.head_size(layer)
            for layer in range(self.num_layers)
            if config.has_attention(layer) and config.kv_source(layer) is None
        )

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's recurrent state in all layers, whatever its length; 0: none."""
        states = map(self.config.state, range(self.num_layers))
        return sum(state.num_bytes(itemsize) for state in states if state is not None)


class _TokenIds(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None
    bos_token_id: int | None = None

    def eos(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id


def read_spec(
    folder: Path, overrides: Mapping[str, Any] | None = None, quantization: str | None = None
) -> ModelSpec:
    """Read config.json and, where there is one, generation_config.json.

    Args:
        overrides, quantization: of ``EngineConfig``.

    Raises:
        ModelError: a file is missing or broken, or the model cannot be served; the message names
            the file and what is wrong in it.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise ModelError(about_folder(path.parent))
    try:
        spec = _read_spec(path, overrides or {})
    except ModelError:
        raise
    except _WRONG_FORM as error:
        raise ModelError(f"{path}: a value is of the wrong form: {error}") from None
    served = served_quantization(spec.quantization, quantization)
    return msgspec.structs.replace(spec, quantization=served)


def _read_spec(path: Path, overrides: Mapping[str, Any]) -> ModelSpec:
    whole = _overridden(read_json(path, required=True), overrides)
    raw = {**whole, **(whole.get("text_config") or {})}
    architecture = _architecture(whole, path)
    if registry.is_backbone(architecture):
        raw["tie_word_embeddings"] = True
    elif "tie_word_embeddings" in whole:  # the text part's may differ, and says nothing
        raw["tie_word_embeddings"] = whole["tie_word_embeddings"]
    config = _convert(raw, registry.find(architecture).config, path)
    try:
        quantization = parse_quantization(raw.get("quantization_config"))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None

    generation_path = path.with_name("generation_config.json")
    generation = read_json(generation_path)
    recommended = _convert(generation, _TokenIds, generation_path)
    own = _convert(raw, _TokenIds, path)
    outer = _convert(whole, _TokenIds, path)
    bos = (recommended.bos_token_id, own.bos_token_id, outer.bos_token_id)
    return ModelSpec(
        architecture=architecture,
        config=config,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=config.context_length,
        eos_token_ids=tuple(dict.fromkeys(recommended.eos() + own.eos() + outer.eos())),
        bos_token_id=next((token for token in bos if token is not None), None),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        sampling=_convert(generation, SamplingDefaults, generation_path),
        quantization=quantization,
    )


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling values of a folder's generation_config.json.

    Raises:
        ModelError: it is missing or broken.
    """
    path = folder.expanduser() / "generation_config.json"
    return _convert(read_json(path, required=True), SamplingDefaults, path)


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other values; those of nested configurations, one by one."""
    changed = dict(config)
    for key, value in overrides.items():
        old = changed.get(key)
        if key.endswith("_config") and isinstance(old, dict) and isinstance(value, dict):
            value = _overridden(old, value)
        elif key in _ROPE_NAMES and isinstance(value, dict):
            # A configuration has one of them, which may hold the base, too.
            for name in _ROPE_NAMES:
                given = changed.pop(name, None) or {}
                value = {k: v for k, v in given.items() if k == "rope_theta"} | value
        changed[key] = value
    return changed


def _architecture(raw: dict[str, Any], path: Path) -> str:
    match raw.get("architectures"):
        case [str() as name, *_]:
            return name
    raise ModelError(f"{path} names no architecture (its 'architectures' is missing or empty)")


def _convert(raw: dict[str, Any], kind: type[T], path: Path) -> T:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, ModelError) as error:
        raise ModelError(f"{path}: {error}") from None
