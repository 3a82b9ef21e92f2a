"""The text part of a checkpoint that also takes images."""

from __future__ import annotations

#: What names of other tensors begin with, after ``model.``.
_OTHERS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)


def text_part(name: str) -> str | None:
    """The name of a tensor in a checkpoint of the text part alone; None if it belongs to another.

    There is ``model.language_model.X``, ``language_model.model.X`` and plain ``model.X``.
    """
    if name.removeprefix("model.").startswith(_OTHERS):
        return None
    return name.replace("language_model.", "", 1)
