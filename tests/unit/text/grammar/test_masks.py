"""Masks and matchers, against what can be worked out without the grammar library."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import tokenizers

import asyncllm.text
from asyncllm.errors import BadRequest
from asyncllm.text.grammar import Choice, JsonObject, JsonSchema, Regex
from asyncllm.text.grammar.compiler import GrammarCompiler
from asyncllm.text.grammar.matcher import MaskFiller, Matcher
from tests.support.text import tokenizers as kinds
from tests.support.text.grammar_sampling import (
    EOS_IDS,
    VOCAB_SIZE,
    compiled,
    count_allowed,
    demo_compiler,
    demo_tokenizer,
    follow,
    new_mask,
    sample,
    tokens_in,
)
from tests.support.text.grammar_schemas import SCHEMAS

TEXTS = ("The quick fox", "The quiet brown", "你好世界", "naïve café", "\n\t", "def encode", "a")


def allowed(matcher: Matcher) -> set[int]:
    row = new_mask()
    matcher.fill(row)
    return set(tokens_in(row))


def compiler_of(kind: kinds.Kind, eos: str) -> tuple[GrammarCompiler, asyncllm.text.Tokenizer, int]:
    """A compiler whose logits are somewhat wider than the tokenizer; with the end token's id."""
    backend = tokenizers.Tokenizer.from_str(kind())
    tokenizer = asyncllm.text.Tokenizer(backend)
    eos_id = backend.token_to_id(eos)
    assert eos_id is not None
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 7, [eos_id]), tokenizer, eos_id


@pytest.mark.parametrize(
    ("kind", "eos"),
    [(kinds.byte_level, "<|end|>"), (kinds.llama2_like, "</s>"), (kinds.gemma_like, "<eos>")],
)
def test_masks_are_the_tokens_that_lead_to_a_choice(kind: kinds.Kind, eos: str) -> None:
    """By brute force over the vocabulary, at every step to every text."""
    compiler, tokenizer, eos_id = compiler_of(kind, eos)
    matcher = compiler.compile(Choice(TEXTS)).matcher()
    targets = [text.encode() for text in TEXTS]
    spelled = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    row = np.zeros(compiler.vocabulary.num_words, np.int32)
    rng = random.Random(0)
    for _ in range(25):
        done, steps = b"", 0
        while True:
            matcher.fill(row)
            expected = {
                token
                for token, piece in spelled.items()
                if piece
                and token not in tokenizer.special_ids
                and any(target.startswith(done + piece) for target in targets)
            }
            expected |= {eos_id} if done in targets else set()
            assert set(tokens_in(row)) == expected
            assert matcher.can_stop == (done in targets)
            if not expected - {eos_id}:
                break
            token = rng.choice(sorted(expected - {eos_id}))
            assert matcher.accept(token)
            done, steps = done + spelled[token], steps + 1
        assert matcher.is_finished
        assert matcher.rollback(steps)


@pytest.mark.parametrize("name", ["nested", "unicode", "any of", "pattern with look-ahead"])
def test_masks_are_the_tokens_that_are_accepted(name: str) -> None:
    grammar = compiled(JsonSchema(SCHEMAS[name]))
    matcher = grammar.matcher()
    for token in [*sample(grammar, seed=1).tokens, None]:
        found = allowed(matcher)
        assert found.isdisjoint(EOS_IDS) == (not matcher.can_stop)
        for candidate in set(range(VOCAB_SIZE)) - set(EOS_IDS):
            accepted = count_allowed(matcher, [candidate]) == 1
            assert accepted == (candidate in found), candidate
        if token is not None:
            assert matcher.accept(token)


def test_masks_do_not_allow_ids_without_a_token() -> None:
    grammar = compiled(Regex(r"[\s\S]*"))
    known = demo_tokenizer().vocab_size
    assert known < VOCAB_SIZE
    found = allowed(grammar.matcher())
    assert max(found) < known
    # All but those that are no text by themselves, of which the end tokens are allowed here.
    assert len(found) > known - 140
    assert found >= set(EOS_IDS)


@pytest.mark.parametrize("kind", kinds.GENERIC_KINDS)
def test_tokens_without_bytes_are_refused(kind: kinds.Kind) -> None:
    tokenizer = kinds.make(kind)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    with pytest.raises(BadRequest, match="not supported with this model"):
        compiler.compile(JsonObject())


def test_end_tokens_are_needed() -> None:
    compiler = GrammarCompiler(demo_tokenizer(), VOCAB_SIZE, [])
    with pytest.raises(BadRequest, match="no end token"):
        compiler.compile(JsonObject())


def test_the_end_is_allowed_exactly_where_the_grammar_ends() -> None:
    matcher = compiled(Regex("(ab)+")).matcher()
    (a,), (b,) = (demo_tokenizer().encode(char, False) for char in "ab")
    for token, ended in ((a, False), (b, True), (a, False), (b, True)):
        assert matcher.accept(token)
        assert matcher.can_stop == ended
        assert allowed(matcher).issuperset(EOS_IDS) == ended
        assert not matcher.is_finished
    assert matcher.accept(EOS_IDS[0])
    assert matcher.is_finished
    assert matcher.error is None


def test_a_wrong_token_ends_its_row_only() -> None:
    grammar = compiled(JsonSchema(SCHEMAS["nested"]))
    good, bad, other = grammar.matcher(), grammar.matcher(), grammar.matcher()
    wrong = next(token for token in range(3, VOCAB_SIZE) if token not in allowed(bad))
    assert not bad.accept(wrong)
    assert "doesn't satisfy" in str(bad.error)
    assert not bad.is_finished
    assert not bad.can_stop
    assert not bad.rollback(1)
    assert not bad.accept(wrong)
    mask = new_mask(3)
    MaskFiller(demo_compiler().vocabulary, threads=2).fill_rows([good, bad, other], mask)
    assert set(tokens_in(mask[1])) == set(EOS_IDS)
    assert set(tokens_in(mask[0])) == set(tokens_in(mask[2])) == allowed(grammar.matcher())
    assert good.error is None


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9, 2**40])
def test_no_token_raises(token: int) -> None:
    matcher = compiled(JsonObject()).matcher()
    assert not matcher.accept(token)
    assert matcher.error


def test_batches_are_filled_as_single_rows_are() -> None:
    matchers: list[Matcher | None] = []
    for index, name in enumerate(SCHEMAS):
        grammar = compiled(JsonSchema(SCHEMAS[name]))
        matcher = grammar.matcher()
        follow(matcher, sample(grammar, seed=index, most=400).tokens[: index % 7])
        matchers += [matcher, None] if index % 5 == 0 else [matcher]
    filler = MaskFiller(demo_compiler().vocabulary, threads=2)
    for mask in (new_mask(len(matchers)), new_mask(len(matchers)).view(np.int32)):
        filler.fill_rows(matchers, mask)
        for one, row in zip(matchers, mask, strict=True):
            if one is None:
                assert (row.view(np.uint32) == 0xFFFFFFFF).all()
            else:
                assert set(tokens_in(row)) == allowed(one)
    mask = new_mask(2)
    filler.fill_rows([None, None], mask)
    assert (mask == 0xFFFFFFFF).all()


def test_masks_of_the_wrong_shape_are_refused() -> None:
    matcher = compiled(JsonObject()).matcher()
    filler = MaskFiller(demo_compiler().vocabulary, threads=1)
    words = demo_compiler().vocabulary.num_words
    with pytest.raises(ValueError, match="words"):
        matcher.fill(np.zeros(words + 1, np.int32))
    with pytest.raises(ValueError, match="words"):
        matcher.fill(np.zeros(words * 2, np.int32)[::2])
    with pytest.raises(ValueError, match="rows"):
        filler.fill_rows([matcher], np.zeros((2, words), np.int32))
    with pytest.raises(ValueError, match="rows"):
        filler.fill_rows([matcher], np.zeros((1, words), np.int64))  # type: ignore[arg-type]


def test_steps_can_be_taken_back() -> None:
    grammar = compiled(JsonSchema(SCHEMAS["a tool call"]))
    tokens = sample(grammar, seed=2).tokens
    matcher = grammar.matcher()
    masks = []
    for token in tokens:
        masks.append(allowed(matcher))
        assert matcher.accept(token)
    assert matcher.is_finished
    finished = []
    for mask in reversed(masks):
        assert matcher.rollback(1)
        finished.append(matcher.is_finished)
        assert allowed(matcher) == mask
    assert not any(finished)


def test_matchers_of_one_grammar_are_apart() -> None:
    grammar = compiled(Choice(("ab", "ac")))
    first, second = grammar.matcher(), grammar.matcher()
    (a,) = demo_tokenizer().encode("a", False)
    before = allowed(second)
    assert first.accept(a)
    assert allowed(first) != before
    assert allowed(second) == before


def test_whitespace_is_bounded() -> None:
    """A model that likes it best comes to an end all the same."""
    grammar = compiled(JsonSchema(SCHEMAS["a tool call"]))
    tokenizer = demo_tokenizer()
    matcher, row, text = grammar.matcher(), new_mask(), ""
    while not matcher.is_finished:
        matcher.fill(row)
        pieces = {token: tokenizer.token_bytes(token) for token in tokens_in(row)}
        blank = [token for token, piece in pieces.items() if piece.isspace()]
        token = max(blank or pieces, key=lambda token: len(pieces[token]))
        assert matcher.accept(token)
        text += tokenizer.decode([token])
        assert len(text) < 2000
    assert max(map(len, re.findall(r"\s+", text))) <= 50
