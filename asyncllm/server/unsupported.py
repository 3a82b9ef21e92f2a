"""Fields that clients send and this server cannot honour yet.

Ignoring them would give a different answer than the one that was asked for, so they get a 400.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.protocol import decode

#: Field -> the values, besides null, that ask for nothing and may pass.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "stop_regex": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

# A second pass over the body that keeps these fields only: the others are skipped, not built.
_Probe = msgspec.defstruct("_Probe", [(name, Any, None) for name in _HARMLESS])


def refuse_unsupported(body: str) -> None:
    """Raise BadRequest when a valid JSON body uses a field of the table."""
    found = decode(body, _Probe)
    for name, harmless in _HARMLESS.items():
        value = getattr(found, name)
        if value is not None and value not in harmless:
            raise unsupported(name)


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
