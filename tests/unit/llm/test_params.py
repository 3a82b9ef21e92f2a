"""What users may put into SamplingParams and EngineConfig."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm import BadRequest, EngineConfig, SamplingParams, TokenDelta, demo
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.requests.check import check_request
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.token_constraints import PreparedParams, is_prepared, prepare
from asyncllm.text import Tokenizer
from asyncllm.text.tokenizer import bad_word_ids
from asyncllm.types import Reasoning, SchedulingParams, TokenLogprob
from asyncllm.types.beam_search import BeamSearchParams
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.wire.messages import Constraints, RowParams, encode, unpack
from tests.support.engine.scheduling import limits

BAD_PARAMS: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("temperature", np.float32(1)),
    ("top_p", 0),
    ("top_k", 2**64),
    ("top_k", 5.0),
    ("top_k", -2),
    ("min_tokens", 2**63),
    ("max_tokens", -1),
    ("max_tokens", 5.5),
    ("seed", 2**63),
    ("seed", np.int64(1)),
    ("logprobs", True),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("stop", ("",)),
    ("stop", ("x",) * 33),
    ("stop", (1,)),
    ("stop_token_ids", (-1,)),
    ("ignore_eos", "yes"),
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
def test_bad_sampling_params_are_named(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_a_single_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_what_can_be_converted_is() -> None:
    params = SamplingParams(top_p=Decimal("0.5"), stop=["a"])  # type: ignore[arg-type]
    assert (params.top_p, type(params.top_p)) == (0.5, float)
    assert params.stop == ("a",)


@pytest.mark.parametrize(
    "kind",
    [
        SamplingParams,
        SchedulingParams,
        BeamSearchParams,
        EmbeddingParams,
        EngineConfig,
        ServerConfig,
    ],
)
def test_defaults_fit_unchanged(kind: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            assert msgspec.convert(field.default, field.type) is field.default, field.name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 99999),
        ("api_key", ("",)),
        ("served_model_name", ("",)),
        ("max_body_bytes", -1),
        ("drain_seconds", -1.0),
        ("drain_seconds", float("nan")),
    ],
)
def test_bad_server_options_are_named(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        ServerConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_whole_numbers_are_fine_where_fractions_are() -> None:
    params = SamplingParams(temperature=0, top_p=1)
    row = RowParams(temperature=params.temperature, top_p=params.top_p)
    assert encode(row)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("dtype", "fp16"),
        ("attention", "flash"),
        ("load_format", "x"),
        ("page_size", "16"),
        ("page_size", 0),
        ("dp", 0),
        ("dp", 257),
        ("steps_in_flight", 3),
        ("gpu_memory_utilization", 1.5),
        ("max_cache_ttl_s", -1.0),
        ("max_cache_ttl_s", 86_401.0),
        ("max_pinned_share", -0.1),
        ("max_pinned_share", 1.1),
        ("max_pinned_share", float("nan")),
        ("max_num_batched_tokens", 3),
    ],
)
def test_bad_options_are_named(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_deltas_merge_in_order() -> None:
    whole = TokenDelta()
    for token in range(3):
        whole.merge(TokenDelta(str(token), [token], [TokenLogprob(token, -1.0)]))
    assert (whole.text, whole.token_ids) == ("012", [0, 1, 2])
    assert whole.logprobs is not None
    assert [entry.token_id for entry in whole.logprobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "x" * 4097}, "stop"),
        ({"stop": ["x" * 2049] * 2}, "stop"),
        ({"bad_words": [list(range(257))]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
    ],
)
def test_texts_that_each_token_is_held_against_are_bounded(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    SamplingParams(stop="x" * 4096, bad_words=["x" * 256, tuple(range(256))])  # type: ignore[arg-type]


VOCAB = 50
EOS = 3


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
    assert sequence.output.params.constraints is constraints


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
