"""What users may put into SamplingParams and EngineConfig."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm import BadRequest, EngineConfig, SamplingParams, TokenDelta
from asyncllm.config.server_config import ServerConfig
from asyncllm.types import SchedulingParams, TokenLogprob
from asyncllm.types.beam_search import BeamSearchParams
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.wire.messages import RowParams, encode

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
