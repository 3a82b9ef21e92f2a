from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text import Detokenizer, Tokenizer
from tests.support.text.tokenizers import (
    BYTE_KINDS,
    GENERIC_KINDS,
    Kind,
    byte_level,
    gemma_like,
    llama2_like,
    make,
    metaspace,
    wordpiece,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def up_to_incomplete_end(text: str, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """``text`` without the U+FFFD of a character that the last tokens leave incomplete."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes, token_ids)))
    incomplete, _ = decoder.getstate()
    return text.removesuffix("�") if incomplete else text


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of real text, any ids of the vocabulary, ids beyond it: in any order."""
    text = draw(st.text(st.sampled_from("the fox 你好世界🙂é▁ \n"), max_size=10))
    ids = tokenizer.encode(text, add_special_tokens=draw(st.booleans()))
    more = draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    return draw(st.permutations(ids + more)) if draw(st.booleans()) else ids + more


@given(data=st.data(), kind=st.sampled_from(BYTE_KINDS), skip=st.booleans())
def test_pieces_join_to_decode_bytes(data: st.DataObject, kind: Kind, skip: bool) -> None:
    tokenizer = make(kind)
    ids = data.draw(id_lists(tokenizer))
    shown = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    expected = up_to_incomplete_end(tokenizer.decode(ids, skip), tokenizer, shown)
    assert "".join(pieces(tokenizer.detokenizer(skip), ids)) == expected


@given(data=st.data(), kind=st.sampled_from(GENERIC_KINDS), skip=st.booleans())
def test_pieces_join_to_decode_generic(data: st.DataObject, kind: Kind, skip: bool) -> None:
    tokenizer = make(kind)
    ids = data.draw(id_lists(tokenizer))
    assert "".join(pieces(tokenizer.detokenizer(skip), ids)) == tokenizer.decode(ids, skip)


@given(data=st.data(), kind=st.sampled_from(BYTE_KINDS + GENERIC_KINDS))
def test_text_continues_the_prompt(data: st.DataObject, kind: Kind) -> None:
    tokenizer = make(kind)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "the", "the fox "])))
    ids = tokenizer.encode(data.draw(st.sampled_from(["", " fox 你", "jumps over"])), False)
    whole, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    assert before + "".join(pieces(tokenizer.detokenizer(True, prompt), ids)) == whole


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_character_is_never_split(kind: Kind) -> None:
    tokenizer = make(kind)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in "a你🙂b".encode()]
    expected = ["a", "", "", "你", "", "", "", "🙂", "b", ""]
    assert pieces(tokenizer.detokenizer(), ids) == expected


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_an_incomplete_end_is_dropped(kind: Kind) -> None:
    tokenizer = make(kind)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in "你🙂".encode()[:-1]]
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == "你"


def test_malformed_bytes_are_replaced_at_once() -> None:
    tokenizer = make(byte_level)
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [single[byte] for byte in (b"a", b"\xff", b"\xe4", b"b")]
    assert pieces(tokenizer.detokenizer(), ids) == ["a", "�", "", "�b", ""]


def test_only_the_first_space_of_a_text_is_stripped() -> None:
    tokenizer = make(llama2_like)
    bos, the = tokenizer.encode(""), tokenizer.encode("the", add_special_tokens=False)
    assert pieces(tokenizer.detokenizer(), bos + the + the) == ["", "the", " the", ""]
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert pieces(shown, bos + the) == ["<s>", " the", ""]
    continued = tokenizer.detokenizer(prompt_ids=bos + the)
    assert pieces(continued, the) == [" the", ""]
    begun = tokenizer.detokenizer(prompt_ids=bos)
    assert pieces(begun, the) == ["the", ""]


def test_gemma_keeps_the_first_space() -> None:
    tokenizer = make(gemma_like)
    ids = tokenizer.encode(" fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == " fox"


@pytest.mark.parametrize(("kind", "text"), [(wordpiece, "the fox jumps"), (metaspace, "the fox")])
def test_generic_text_comes_token_by_token(kind: Kind, text: str) -> None:
    tokenizer = make(kind)
    *parts, rest = pieces(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(parts) == text
    assert rest == ""
    assert len([part for part in parts if part]) > 2


def test_generic_does_not_hold_back_endless_replacement_characters() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"�": 0, "a": 1}, unk_token="�"))
    backend.decoder = tokenizers.decoders.Fuse()
    detokenizer = Tokenizer(backend).detokenizer()
    assert "".join(detokenizer.push(0) for _ in range(100)) == "�" * 100
    assert detokenizer.push(0) + detokenizer.push(1) == "�a"
