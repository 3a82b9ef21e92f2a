"""Constraints on tokens, prepared once for all sequences of a request."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asyncllm.config import EngineLimits
from asyncllm.errors import BadRequest
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import Constraints, pack


class CompiledGrammar(Protocol):
    """A grammar that sequences can be sampled under."""

    @property
    def key(self) -> bytes:
        """Its name for the sampler."""


class PreparedParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters whose constraints on tokens are checked, and encoded for the executor.

    Attributes:
        compiled: the grammar that ``constraints`` names. The sampler looks it up by its key, in a
            table of weak references: this keeps it alive.
        predicted_ids: the tokens of ``prediction``.
    """

    constraints: Constraints = Constraints()
    compiled: Any = None  # a CompiledGrammar; msgspec cannot check for a Protocol
    predicted_ids: tuple[int, ...] = ()


def is_prepared(params: SamplingParams) -> bool:
    """Whether there is nothing left for ``prepare`` to do."""
    fields = (params.logit_bias, params.allowed_token_ids, params.grammar, params.prediction)
    return (
        fields == (None, None, None, None)
        and not params.bad_words
        and not _limits_reasoning(params)
    )


def prepare(
    params: SamplingParams,
    words: Sequence[tuple[int, ...]],
    limits: EngineLimits,
    grammar: CompiledGrammar | None = None,
    predicted_ids: Sequence[int] = (),
) -> PreparedParams:
    """``params`` with their constraints compiled.

    Args:
        words: the token ids of ``params.bad_words``.
        grammar: ``params.grammar``, compiled.
        predicted_ids: the token ids of ``params.prediction``.

    Raises:
        BadRequest: a token id is out of range, or no token would be left.
    """
    bias = params.logit_bias or {}
    _check_ids("logit_bias", bias, limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    _check_ids("bad_words", list(chain.from_iterable(words)), limits)
    if params.reasoning is not None:
        reasoning = params.reasoning
        ids = reasoning.start_ids + reasoning.end_ids + reasoning.closing_ids
        _check_ids("reasoning", ids, limits)
    constraints = Constraints(
        bias_ids=pack(bias),
        biases=array("f", bias.values()).tobytes(),
        mask=_mask(params, [word[0] for word in words if len(word) == 1], limits),
        bad_words=tuple(dict.fromkeys(word for word in words if len(word) > 1)),
        grammar=b"" if grammar is None else grammar.key,
        reasoning=params.reasoning if grammar is not None or _limits_reasoning(params) else None,
    )
    fields: dict[str, Any] = msgspec.structs.asdict(params)
    fields |= {"logit_bias": None, "allowed_token_ids": None, "bad_words": (), "grammar": None}
    fields |= {"prediction": None, "predicted_ids": tuple(predicted_ids[: limits.max_model_len])}
    if params.reasoning is not None:
        # Stop strings still need to know where it ends.
        fields["reasoning"] = msgspec.structs.replace(params.reasoning, max_tokens=None)
    return PreparedParams(**fields, constraints=constraints, compiled=grammar)


def _limits_reasoning(params: SamplingParams) -> bool:
    return params.reasoning is not None and params.reasoning.max_tokens is not None


def _mask(params: SamplingParams, banned: list[int], limits: EngineLimits) -> bytes:
    """Bits of the tokens that are allowed and not banned; empty if all are."""
    if params.allowed_token_ids is None and not banned:
        return b""
    allowed = np.zeros(-(-limits.vocab_size // 32) * 32, dtype=np.uint8)
    if params.allowed_token_ids is None:
        allowed[: limits.vocab_size] = 1
    else:
        allowed[_array(params.allowed_token_ids)] = 1
    allowed[banned] = 0
    if not allowed.any():
        raise BadRequest("bad_words leave no token to choose from", param="bad_words")
    mask = np.packbits(allowed, bitorder="little").tobytes()
    if params.min_tokens and params.grammar is None:
        allowed[list(params.stop_token_ids)] = 0
        if not params.ignore_eos:
            allowed[list(limits.eos_token_ids)] = 0
        if not allowed.any():
            raise BadRequest("no allowed token is left for min_tokens", param="min_tokens")
    return mask


def _check_ids(name: str, ids: Collection[int], limits: EngineLimits) -> None:
    found = _array(ids)
    if found.size and not 0 <= found.min() <= found.max() < limits.vocab_size:
        message = f"token ids of {name} must be between 0 and {limits.vocab_size - 1}"
        raise BadRequest(message, param=name)


def _array(ids: Collection[int]) -> npt.NDArray[np.int32]:
    # Through array(): np.array takes twice as long for a tuple.
    return np.frombuffer(array("i", ids), dtype=np.int32)
