"""The cache of grammars: what is kept, for how long, and what compiling costs the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from asyncllm.errors import BadRequest, QueueFull
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
from asyncllm.text.grammar.limits import MAX_COMPILE_SECONDS, Budget, TooSlow
from asyncllm.text.grammar.matcher import Grammar
from asyncllm.text.grammar.schema.writer import schema_rules
from tests.support.text.grammar_sampling import EOS_IDS, VOCAB_SIZE, demo_tokenizer, sample

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


def builds_of(compiler: GrammarCompiler, seconds: float = 0.0) -> list[Any]:
    """The specs that are compiled from now on; each takes so much longer."""
    built: list[Any] = []
    build = compiler._build

    def counted(key: bytes, spec: GrammarSpec, limit: float) -> Grammar:
        built.append(spec)
        time.sleep(seconds)
        return build(key, spec, limit)

    compiler._build = counted  # type: ignore[method-assign, assignment]
    return built


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
    built = builds_of(compiler)
    for pattern in "12131":
        compiler.compile(Regex(pattern))
    assert [spec.pattern for spec in built] == ["1", "2", "3"]
    compiler.compile(Regex("2"))
    assert [spec.pattern for spec in built] == ["1", "2", "3", "2"]


def test_bytes_are_bounded() -> None:
    size = new_compiler().compile(Regex("a")).num_bytes
    compiler = new_compiler(max_bytes=size * 3)
    built = builds_of(compiler)
    for char in "abcdeedc":
        compiler.compile(Regex(char))
    assert len(built) == 5
    compiler.compile(Regex("a"))
    compiler.compile(Regex("b"))
    assert len(built) == 7


def test_what_is_evicted_still_works() -> None:
    compiler = new_compiler(max_grammars=1)
    grammar = compiler.compile(Choice(("left", "right")))
    compiler.compile(Regex("other"))
    assert sample(grammar, seed=0).text in ("left", "right")


def test_what_somebody_has_is_not_compiled_again() -> None:
    compiler = new_compiler(max_grammars=1)
    held = [compiler.compile(Regex(char)) for char in "abc"]
    built = builds_of(compiler)
    assert [compiler.compile(Regex(char)) for char in "abc"] == held
    assert [compiler.known(grammar.key) for grammar in held] == held
    assert not built
    keys = [grammar.key for grammar in held]
    held.clear()
    assert compiler.known(keys[2])  # the latest is kept
    for key in keys[:2]:
        with pytest.raises(LookupError):
            compiler.known(key)
    assert not built


async def test_a_waiter_that_gives_up_does_not_stop_the_others() -> None:
    compiler = new_compiler()
    compiler.vocabulary  # noqa: B018
    go, build = threading.Event(), compiler._build

    def late(key: bytes, spec: GrammarSpec, seconds: float) -> Grammar:
        go.wait(5)
        return build(key, spec, seconds)

    compiler._build = late  # type: ignore[method-assign]
    waiting = [asyncio.create_task(compiler.compile_async(Regex("x"))) for _ in range(3)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    waiting[1].cancel()
    await asyncio.sleep(0.01)
    go.set()
    assert (await waiting[2]).key == cache_key(Regex("x"))
    compiler.close()


async def test_what_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    compiler.vocabulary  # noqa: B018
    go, build = threading.Event(), compiler._build
    limit = 3
    monkeypatch.setattr("asyncllm.text.grammar.compiler._MOST_SLOW", limit)

    def slow(key: bytes, spec: GrammarSpec, seconds: float) -> Grammar:
        assert isinstance(spec, Regex)
        if spec.pattern.startswith("slow"):
            if seconds < MAX_COMPILE_SECONDS:
                raise TooSlow
            go.wait(5)
        return build(key, spec, seconds)

    compiler._build = slow  # type: ignore[method-assign]
    patterns = [f"slow{index}" for index in range(limit + 1)]
    long = [asyncio.create_task(compiler.compile_async(Regex(pattern))) for pattern in patterns]
    done, _ = await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [QueueFull]
    # Quick ones pass them by.
    for index in range(20):
        assert await asyncio.wait_for(compiler.compile_async(Regex(f"quick{index}")), 5)
    go.set()
    found = await asyncio.gather(*(task for task in long if task not in done))
    assert len(set(found)) == limit
    assert await compiler.compile_async(Regex("slow again"))  # there is room once more
    compiler.close()


def test_the_time_to_compile_is_bounded() -> None:
    with pytest.raises(BadRequest, match="takes too long"):
        schema_rules({"allOf": [{"minLength": 1}] * 50}, budget=Budget(0.0))


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
    built = builds_of(compiler, seconds=0.05)
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
