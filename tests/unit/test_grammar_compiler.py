"""The cache of grammars: what is kept, for how long, and what compiling costs the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import (
    Choice,
    Ebnf,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
    cache_key,
)
from asyncllm.text.grammar.compiler import GrammarCompiler
from tests.unit.grammar_sampling import EOS_IDS, VOCAB_SIZE, demo_tokenizer, sample

SPECS: list[GrammarSpec] = [
    JsonObject(),
    JsonSchema({"type": "object"}),
    JsonSchema(True),
    Regex("a"),
    Choice(("a",)),
    Ebnf('start: "a"'),
    StructuralTags((Tag("a", True, ""),), ("a",)),
]


def new_compiler(**limits: int) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), VOCAB_SIZE, EOS_IDS, **limits)


def test_equal_specs_share_a_grammar() -> None:
    compiler = new_compiler()
    first = compiler.compile(JsonSchema({"type": "array", "items": {"type": "null"}}))
    again = compiler.compile(JsonSchema({"type": "array", "items": {"type": "null"}}))
    assert first is again


def test_keys_differ_where_grammars_do() -> None:
    others: list[GrammarSpec] = [
        JsonSchema({"type": "object", "properties": {"a": {}, "b": {}}}),
        JsonSchema({"type": "object", "properties": {"b": {}, "a": {}}}),
        JsonSchema({"const": 1}),
        JsonSchema({"const": "1"}),
        JsonSchema({"const": True}),
        StructuralTags((Tag("a", True, ""),), ("a",), at_least_one=True),
    ]
    keys = [cache_key(spec) for spec in SPECS + others]
    assert len(set(keys)) == len(keys)
    assert all(cache_key(spec) == key for spec, key in zip(SPECS + others, keys, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_specs_are_plain_data(spec: GrammarSpec) -> None:
    encoded = msgspec.json.encode(spec)
    assert msgspec.json.decode(encoded, type=GrammarSpec) == spec


def test_the_least_recently_used_goes_first() -> None:
    compiler = new_compiler(max_grammars=2)
    one, two = compiler.compile(Regex("1")), compiler.compile(Regex("2"))
    assert compiler.compile(Regex("1")) is one
    compiler.compile(Regex("3"))
    assert compiler.compile(Regex("1")) is one
    assert compiler.compile(Regex("2")) is not two


def test_bytes_are_bounded() -> None:
    size = new_compiler().compile(Regex("a")).num_bytes
    compiler = new_compiler(max_bytes=size * 3)
    grammars = [compiler.compile(Regex(char)) for char in "abcde"]
    kept = [
        compiler.compile(Regex(char)) is grammar
        for char, grammar in reversed(list(zip("abcde", grammars, strict=True)))
    ]
    assert kept[:3] == [True] * 3
    assert not any(kept[3:])


def test_what_is_evicted_still_works() -> None:
    compiler = new_compiler(max_grammars=1)
    grammar = compiler.compile(Choice(("left", "right")))
    compiler.compile(Regex("other"))
    assert sample(grammar, seed=0).text in ("left", "right")


def test_refusals_are_not_kept_and_name_their_field() -> None:
    compiler = new_compiler()
    for param in ("response_format", "guided_regex", None):
        with pytest.raises(BadRequest, match="lacks") as caught:
            compiler.compile(Regex("("), param=param)
        assert caught.value.param == param
        assert caught.value.status == 400


def test_threads_that_want_the_same_compile_it_once() -> None:
    compiler = new_compiler()
    compiler.vocabulary  # noqa: B018
    built = []
    build = compiler._build

    def slow_build(spec: GrammarSpec) -> object:
        built.append(spec)
        time.sleep(0.05)
        return build(spec)

    compiler._build = slow_build  # type: ignore[method-assign, assignment]
    barrier = threading.Barrier(6)

    def work(index: int) -> object:
        barrier.wait()
        return compiler.compile(Regex("same") if index % 2 else Regex("other"))

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6)))
    assert len(built) == 2
    assert len(set(map(id, found))) == 2


def test_waiting_threads_share_a_refusal() -> None:
    compiler = new_compiler()
    barrier = threading.Barrier(4)

    def work(_: int) -> str:
        barrier.wait()
        try:
            compiler.compile(Regex("("))
        except BadRequest as error:
            return error.message
        return ""

    with ThreadPoolExecutor(4) as pool:
        assert all("lacks" in message for message in pool.map(work, range(4)))
    assert compiler.compile(Regex("fine"))


async def test_compiling_leaves_the_loop_alone() -> None:
    compiler = new_compiler()
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    heart = asyncio.create_task(beat())
    many = {f"p{index}": {"type": "string"} for index in range(600)}
    grammar = await compiler.compile_async(JsonSchema({"type": "object", "properties": many}))
    heart.cancel()
    assert beats > 3
    assert sample(grammar, 0, most=5).tokens
    with pytest.raises(BadRequest, match="lacks"):
        await compiler.compile_async(Regex("("))
    compiler.close()
