"""Arguments of the wrong type, or in each other's places, are refused by the parameter's name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm import (
    LLM,
    AsyncLLM,
    BadRequest,
    Client,
    EngineConfig,
    SamplingParams,
    SchedulingParams,
)
from asyncllm.types import is_single, plain_prompt
from tests.support.server.echo_llm import EchoLLM, echo_class

SAMPLING: Any = SamplingParams()
SCHEDULING: Any = SchedulingParams()
UNTYPED: Any = {"max_tokens": 5}
PATH: Any = "config.yaml"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate("hi", SCHEDULING), "params must be SamplingParams, not Scheduling"),
        (lambda m: m.generate(["hi"], SCHEDULING), "params must be SamplingParams, not Schedul"),
        (lambda m: m.generate("hi", UNTYPED), "SamplingParams, not dict; use SamplingParams(**"),
        (lambda m: m.generate("hi", None, SAMPLING), "scheduling must be SchedulingParams, not S"),
        (lambda m: m.generate(["hi"], None, SAMPLING), "scheduling must be SchedulingParams"),
        (lambda m: m.generate(["hi"], [UNTYPED]), "params[0] must be SamplingParams, not dict"),
        (lambda m: m.generate("hi", [SAMPLING]), "params must be SamplingParams, not list"),
        (lambda m: m.generate(SAMPLING, "hi"), "a prompt is text, .*, not SamplingParams"),
        (lambda m: m.generate(5), "a prompt is text, .*, not int"),
        (lambda m: m.generate(b"hi"), "a prompt is text, .*, not bytes"),
        (lambda m: m.generate({"role": "user"}), "a prompt is text, .*, not dict"),
        (lambda m: m.generate(x for x in "ab"), "a prompt is text, .*, not generator"),
        (lambda m: m.generate([1, "a"]), "not a list of int, str"),
    ],
)
async def test_calls(
    call: Callable[[Any], Awaitable[Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = ".*".join(map(re.escape, message.split(".*")))
    async with echo_class()() as llm:
        with pytest.raises(BadRequest, match=pattern):
            await call(llm)
        assert not llm.params, "nothing was submitted"
    monkeypatch.setattr("asyncllm.llm.llm.AsyncLLM", echo_class())
    with LLM() as offline, pytest.raises(BadRequest, match=pattern):
        call(offline)


async def test_streams_and_clients() -> None:
    async with echo_class()() as llm:
        with pytest.raises(BadRequest, match="params must be SamplingParams"):
            await anext(llm.stream("hi", SCHEDULING))
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(BadRequest, match="params must be SamplingParams"):
            await client.generate("hi", SCHEDULING)
        with pytest.raises(BadRequest, match="scheduling must be SchedulingParams"):
            await client.generate("hi", None, SAMPLING)


@pytest.mark.parametrize("kind", [AsyncLLM, LLM])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((SAMPLING,), {}, "model must be str or Path, not SamplingParams"),
        ((EngineConfig(),), {}, "use config=EngineConfig"),
        ((), {"config": PATH}, "config must be EngineConfig, not str"),
        ((), {"config": UNTYPED}, r"config must be EngineConfig, not dict; use EngineConfig\(\*\*"),
        ((), {"policy": 5}, "policy must be Policy, not int"),
        ((), {"max_num_seq": 5}, "unknown option 'max_num_seq'; did you mean max_num_seqs?"),
        ((), {"max_num_seqs": "5"}, "max_num_seqs: Expected `int`, got `str`"),
    ],
)
def test_models(kind: Any, arguments: tuple[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        kind(*arguments, **options)


def test_paths_are_options_too(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path, chat_template=tmp_path / "x.jinja")
    assert llm.config == EngineConfig(model=str(tmp_path), chat_template=str(tmp_path / "x.jinja"))


def test_fields() -> None:
    with pytest.raises(BadRequest, match=r"max_tokens: Expected `int.*, got `str`"):
        SamplingParams(max_tokens="5")  # type: ignore[arg-type]


def test_arrays_are_prompts() -> None:
    assert is_single(np.array([1, 2]))  # type: ignore[arg-type]
    assert plain_prompt(np.array([1, 2])) == [1, 2]  # type: ignore[arg-type]
    assert not is_single(np.array([[1, 2]]))  # type: ignore[arg-type]
    assert not is_single(np.array(["a", "b"]))  # type: ignore[arg-type]
    assert not is_single([])


async def test_an_array_of_token_ids_is_answered() -> None:
    async with echo_class()() as llm:
        ids = np.array([104, 105])
        assert (await llm.generate(ids)).text == "hi"
        assert [a.text for a in await llm.generate(np.stack([ids, ids]))] == ["hi", "hi"]
        assert isinstance(llm, EchoLLM)
