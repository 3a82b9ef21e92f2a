"""Whatever SamplingParams accepts, the executor can decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.states import NoStates
from asyncllm.engine.scheduling.step import Step
from asyncllm.engine.token_constraints import prepare
from asyncllm.errors import BadRequest
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.requests import GeneratingFields
from asyncllm.types import LogitParams, Reasoning, SamplingParams, SchedulingParams
from asyncllm.wire.messages import RowParams, check_params, decode_plan, encode
from tests.support.engine.scheduling import limits

EDGES = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**70]
INTEGERS = st.integers(-3, 120) | st.sampled_from([*EDGES, *(-edge for edge in EDGES)])
NUMBERS = INTEGERS | st.floats() | st.sampled_from([1e-300, 1e308, 100.0])
IDS = st.lists(INTEGERS, max_size=3)
TEXTS = st.lists(st.sampled_from(["", "\ud800", "</think>", "\0é"]), max_size=2)
REASONING = st.fixed_dictionaries(
    {"end_ids": IDS},
    optional={
        "start_ids": IDS,
        "max_tokens": INTEGERS,
        "closing_ids": IDS,
        "start_texts": TEXTS,
        "end_texts": TEXTS,
    },
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": INTEGERS,
    "min_p": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "logit_bias": st.dictionaries(INTEGERS, NUMBERS, max_size=2),
    "allowed_token_ids": IDS,
    "bad_words": st.lists(IDS, max_size=2),
    "max_tokens": INTEGERS,
    "min_tokens": INTEGERS,
    "stop_token_ids": IDS,
    "seed": INTEGERS,
    "logprobs": INTEGERS,
    "prompt_logprobs": INTEGERS,
    "ignore_eos": st.booleans(),
}


@dataclass
class Named:
    """All that is asked of a compiled grammar here."""

    key: bytes


@given(
    fields=st.fixed_dictionaries({}, optional=FIELDS),
    reasoning=st.none() | REASONING,
    key=st.none() | st.binary(min_size=1, max_size=4),
)
def test_what_is_accepted_can_be_decoded(
    fields: dict[str, Any], reasoning: dict[str, Any] | None, key: bytes | None
) -> None:
    lim = limits()
    try:
        made = None if reasoning is None else Reasoning(**reasoning)
        params = SamplingParams(**fields, reasoning=made)
        words: Any = [word for word in params.bad_words if word]
        prepared = prepare(params, words, lim, None if key is None else Named(key))
        seq = Sequence(
            1,
            [1, 2],
            prepared,
            SchedulingParams(),
            max_length=10,
            eos_ids=(7,),
            seed=0 if params.seed is None else params.seed,
            arrival=0.0,
        )
        check_params(seq.output.params)
    except BadRequest:
        return
    seq.slot, step = 0, Step(0)
    step.admit(seq)
    plan = step.message(b"", NoStates())
    assert encode(decode_plan(encode(plan))) == encode(plan)


@pytest.mark.parametrize("name", LogitParams.__struct_fields__)
def test_a_number_reaches_the_executor_by_its_name(name: str) -> None:
    value = 7 if name == "top_k" else 0.25
    body = msgspec.convert({name: value}, GeneratingFields)
    params = sampling_params(body, SamplingParams(), max_tokens=5, logprobs=None)
    rest: dict[str, Any] = {"max_length": 10, "eos_ids": (), "seed": 0, "arrival": 0.0}
    seq = Sequence(1, [1, 2], params, SchedulingParams(), **rest)
    unchanged = RowParams(min_length=2)
    assert seq.output.params == msgspec.structs.replace(unchanged, **{name: value})


@pytest.mark.parametrize("field", ["max_tokens", "start_ids", "end_ids", "closing_ids"])
def test_reasoning_checks_itself(field: str) -> None:
    value: Any = 2**31 if field == "max_tokens" else (2**31,)
    fields: dict[str, Any] = {"end_ids": (1,), field: value}
    with pytest.raises(BadRequest, match="2147483647") as caught:
        Reasoning(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(f"reasoning.{field}")


def test_what_got_past_all_other_checks_is_refused_before_it_is_sent() -> None:
    good = RowParams()
    check_params(good)
    bad: Any = "hot"
    for params in (RowParams(temperature=bad), RowParams(seed=2**70)):
        with pytest.raises(BadRequest, match="out of range"):
            check_params(params)
