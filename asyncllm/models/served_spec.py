"""The spec of a model as it is served, with the layer that drafts for it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from asyncllm.config import EngineConfig, speculation_of
from asyncllm.errors import ModelError
from asyncllm.models.config.base import DecoderConfig
from asyncllm.models.eagle3_config import read_eagle3
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.models.spec import ModelSpec, read_spec


def served_spec(folder: Path, config: EngineConfig) -> ModelSpec:
    """Read the spec of the model in this folder, served with these options.

    Raises:
        ModelError: it cannot be served, or what is to draft for it does not fit it; the message
            says why.
    """
    spec = read_spec(folder, config.model_overrides, config.quantization)
    speculation = speculation_of(config)
    if speculation is None or not speculation.has_head or config.device == "sim":
        return spec
    if speculation.method == "mtp":
        return replace(spec, predicts_ahead=True)
    if not isinstance(spec.config, DecoderConfig):
        raise ModelError(
            f"EAGLE-3 heads cannot draft for {spec.architecture}", param="speculative_config"
        )
    head = find_head(config)
    assert head is not None, "eagle3 has a model"
    return replace(spec, eagle3=read_eagle3(head, spec.config))


def find_head(config: EngineConfig) -> Path | None:
    """The folder of the EAGLE-3 head, by download if needed; None if these options name none.

    Raises:
        ModelError: it cannot be found.
    """
    speculation = speculation_of(config)
    if speculation is None or speculation.model is None or config.device == "sim":
        return None
    try:
        return resolve_folder(speculation.model, None, config.download_dir)
    except ModelError as error:
        raise ModelError(f"the head that drafts: {error}", param="speculative_config") from None
