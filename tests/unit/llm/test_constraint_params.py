"""What may be asked of tokens: SamplingParams, what the engine makes of it, and bad words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm import BadRequest, SamplingParams, demo
from asyncllm.engine.requests.check import check_request
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.token_constraints import PreparedParams, is_prepared, prepare
from asyncllm.text import Tokenizer
from asyncllm.text.bad_words import bad_word_ids
from asyncllm.types import Reasoning, SchedulingParams
from asyncllm.wire.messages import Constraints, unpack
from tests.support.engine.scheduling import limits

VOCAB = 50
EOS = 3

BAD_PARAMS: list[tuple[str, Any]] = [
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: -101}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", {"one": 1.0}),
    ("logit_bias", {2**31: 1.0}),
    ("logit_bias", [(1, 1.0)]),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", ("a",)),
    ("allowed_token_ids", (2**31,)),
    ("bad_words", ("",)),
    ("bad_words", ("  ",)),
    ("bad_words", ((),)),
    ("bad_words", (("a",),)),
    ("bad_words", "word"),
    ("bad_words", ("word",) * 257),
    ("bad_words", ((1,),) * 257),
    ("bad_words", ("w" * 257,)),
    ("reasoning", Reasoning()),
    ("reasoning", Reasoning(end_ids=(1,), max_tokens=-1)),
    ("reasoning", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_constraints_are_named(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_what_is_as_large_as_it_may_be() -> None:
    params = SamplingParams(
        logit_bias={**dict.fromkeys(range(1023), 100), 5000: -100},
        bad_words=("w" * 256,) * 256,
        allowed_token_ids=[1],  # type: ignore[arg-type]
    )
    assert params.allowed_token_ids == (1,)
    assert params.logit_bias is not None
    assert params.logit_bias[5000] == -100


LIMITS = limits(vocab_size=VOCAB, eos_token_ids=(EOS,))


def prepared(**asked: Any) -> PreparedParams:
    params = SamplingParams(**asked)
    words = [word for word in params.bad_words if isinstance(word, tuple)]
    return prepare(params, words, LIMITS)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (1, VOCAB)}),
        ("allowed_token_ids", {"allowed_token_ids": (1, -1)}),
        ("bad_words", {"bad_words": ((1, VOCAB),)}),
        ("reasoning", {"reasoning": Reasoning(end_ids=(VOCAB,), max_tokens=1)}),
        ("bad_words", {"bad_words": ((1,), (2,)), "allowed_token_ids": (1, 2, 2)}),
        ("bad_words", {"bad_words": tuple((token,) for token in range(VOCAB))}),
        ("min_tokens", {"min_tokens": 1, "allowed_token_ids": (EOS,)}),
        (
            "min_tokens",
            {
                "min_tokens": 1,
                "allowed_token_ids": (1, 2, EOS),
                "bad_words": ((1,),),
                "stop_token_ids": (2,),
            },
        ),
    ],
)
def test_what_can_never_be_sampled_is_refused(name: str, asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        prepared(**asked)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {0: 1.0, VOCAB - 1: -100}},
        {"allowed_token_ids": (EOS,)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": (EOS,), "min_tokens": 1, "grammar": "one that may end at once"},
        {"bad_words": tuple((token,) for token in range(VOCAB - 1))},
        {"bad_words": ((1,),), "min_tokens": 2, "stop_token_ids": (2,)},
        {"bad_words": ((1, 1),), "allowed_token_ids": (1,)},
    ],
)
def test_what_can_be_sampled_is_not_refused(asked: dict[str, Any]) -> None:
    check_request([1, 2], prepared(**asked), LIMITS)


def test_what_is_prepared_travels() -> None:
    params = prepared(
        logit_bias={4: -100, 2: 0.5},
        allowed_token_ids=(5, 33, 1, 40),
        bad_words=((1, 2), (33,), (1, 2), (3, 3, 3)),
        seed=7,
        stop=("x",),
    )
    assert (params.seed, params.stop) == (7, ("x",))
    assert is_prepared(params)
    constraints = params.constraints
    assert unpack(constraints.bias_ids).tolist() == [4, 2]
    assert np.frombuffer(constraints.biases, dtype="<f4").tolist() == [-100, 0.5]
    assert unpack(constraints.mask).tolist() == [1 << 5 | 1 << 1, 1 << 8]
    assert constraints.bad_words == ((1, 2), (3, 3, 3))
    assert prepared(bad_words=((1, 2),)).constraints.mask == b""
    only_first = prepared(bad_words=tuple((token,) for token in range(1, VOCAB))).constraints
    assert unpack(only_first.mask).tolist() == [1, 0]
    # Variants of it, such as other seeds, share what is large.
    again = msgspec.structs.replace(params, seed=8)
    assert again.constraints is constraints
    sequence = Sequence(
        1, [5], again, SchedulingParams(), max_length=9, eos_ids=(EOS,), seed=8, arrival=0.0
    )
    assert sequence.row_params.constraints is constraints


def test_reasoning_alone_constrains_nothing() -> None:
    reasoning = Reasoning(end_ids=(1,))
    assert is_prepared(SamplingParams(reasoning=reasoning))
    limited = Reasoning(end_ids=(1,), max_tokens=4)
    assert not is_prepared(SamplingParams(reasoning=limited))
    assert prepared(reasoning=limited).constraints == Constraints(reasoning=limited)
    assert prepared(reasoning=reasoning, logit_bias={1: 1}).constraints.reasoning is None
    params = SamplingParams(reasoning=reasoning, grammar="x")
    made = prepare(params, (), LIMITS, SimpleNamespace(key=b"x"))
    assert made.constraints.reasoning is reasoning
    assert made.constraints.grammar == b"x"
    assert made.compiled.key == b"x"  # kept for as long as the request


def test_constraints_are_never_left_out_unseen() -> None:
    for asked in (
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"bad_words": ("x",)},
        {"grammar": "x"},
    ):
        params = SamplingParams(**asked)
        assert not is_prepared(params)
        with pytest.raises(BadRequest, match="prepare"):
            check_request([1, 2], params, LIMITS)


async def test_words_are_tokenized_as_they_begin_a_text_and_after_a_space() -> None:
    tokenizer = Tokenizer.from_folder(demo.path())
    words: list[str | tuple[int, ...]] = ["story", " 24", (7, 8), "unbelievable", "story", "💥"]
    found = await bad_word_ids(tokenizer, words)
    assert found[0] == (7, 8)
    assert len(set(found)) == len(found)
    texts = {tokenizer.decode(ids) for ids in found[1:]}
    bare = ["story", "24", "unbelievable", "💥"]
    assert texts == {*bare, *(f" {word}" for word in bare)}
    assert not any(set(ids) & set(tokenizer.special_ids) for ids in found)
    with pytest.raises(BadRequest, match="surrogate"):
        await bad_word_ids(tokenizer, ["\ud800"])
    tokenizer.close()
