"""Fields that clients send and this server cannot honour yet.

Ignoring them would give a different answer than the one that was asked for, so they get a 400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Field -> the values, besides null, that ask for nothing and may pass.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_path": (),
    "moderation": (),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "stop_regex": ([],),
    "suffix": ("",),
}


def refuse_unsupported(asked: object, fields: Mapping[str, Any]) -> None:
    """
    Args:
        asked: the request.
        fields: what else was sent.

    Raises:
        BadRequest: it uses a field of the table, in a way that asks for something.
    """
    for name, harmless in UNSUPPORTED.items():
        value = getattr(asked, name, None) or fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
