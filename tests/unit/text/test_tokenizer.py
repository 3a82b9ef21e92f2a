from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text import Tokenizer
from tests.support.text.tokenizers import (
    BYTE_KINDS,
    GENERIC_KINDS,
    Kind,
    byte_level,
    gemma_like,
    llama2_like,
    make,
    metaspace,
    with_markers,
    wordpiece,
    write_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces \n\n and\tlines ",
    "你好世界,café naïve 🙂👩‍👩‍👧 \x00 ﷽",
    "<|begin|>the <tool call> fox<｜wide▁token｜></s><s> [SEP]",
]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer


class TestEncode:
    @pytest.mark.parametrize("kind", BYTE_KINDS + GENERIC_KINDS)
    def test_ids_equal_those_of_transformers(
        self, kind: Kind, tmp_path: Path, auto_tokenizer: Any
    ) -> None:
        folder = write_folder(tmp_path, kind())
        ours, theirs = Tokenizer.from_folder(folder), auto_tokenizer.from_pretrained(folder)
        assert ours.vocab_size == len(theirs)
        for text in TEXTS:
            for special in (True, False):
                assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)

    @pytest.mark.parametrize("post_processor", [True, False])
    @pytest.mark.parametrize("add_bos_token", [True, False])
    def test_post_processor_decides_about_bos_as_in_transformers(
        self, add_bos_token: bool, post_processor: bool, tmp_path: Path, auto_tokenizer: Any
    ) -> None:
        saved = json.loads(llama2_like())
        if not post_processor:
            saved["post_processor"] = None
        config = {"bos_token": "<s>", "add_bos_token": add_bos_token}
        folder = write_folder(tmp_path, json.dumps(saved), config)
        ours = Tokenizer.from_folder(folder).encode("the fox")
        assert ours == auto_tokenizer.from_pretrained(folder).encode("the fox")
        assert (ours[0] == 1) == post_processor

    def test_truncation_and_padding_of_the_file_are_off(self) -> None:
        backend = tokenizers.Tokenizer.from_str(byte_level())
        backend.enable_truncation(3)
        backend.enable_padding(length=8)
        tokenizer = Tokenizer(backend)
        assert len(tokenizer.encode("a")) == 2
        assert len(tokenizer.encode("one two three four five six")) > 8

    @pytest.mark.parametrize("length", [10, 5000])
    async def test_async_gives_the_same_ids_in_order(self, length: int) -> None:
        tokenizer = make(byte_level)
        batch = [("你好 fox " * length)[:length], "", "the dog"]
        for special in (True, False):
            expected = [tokenizer.encode(text, special) for text in batch]
            assert await tokenizer.encode_async(batch, special) == expected
            assert await tokenizer.encode_async(batch[:1], special) == expected[:1]
        assert await tokenizer.encode_async([]) == []
        tokenizer.close()
        tokenizer.close()

    @pytest.mark.parametrize("length", [1, 5000])
    async def test_unpaired_surrogate_is_a_bad_request(self, length: int) -> None:
        tokenizer = make(byte_level)
        with pytest.raises(BadRequest, match="surrogate"):
            await tokenizer.encode_async(["\ud800" * length])
        tokenizer.close()


class TestDecode:
    @given(text=texts)
    def test_round_trip(self, text: str) -> None:
        for kind, expected in (
            (byte_level, unicodedata.normalize("NFC", text)),
            (gemma_like, text.replace("▁", " ")),
            (llama2_like, text.replace("▁", " ")),
        ):
            tokenizer = make(kind)
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected

    @given(data=st.data(), kind=st.sampled_from(BYTE_KINDS + GENERIC_KINDS))
    def test_equals_the_tokenizers_library(self, data: st.DataObject, kind: Kind) -> None:
        tokenizer, backend = make(kind), tokenizers.Tokenizer.from_str(kind())
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20))
        for skip in (True, False):
            theirs = backend.decode(ids, skip_special_tokens=skip)
            # Byte fallback there gives up whole runs of bytes for one malformed byte.
            if kind in (llama2_like, gemma_like) and "�" in theirs:
                continue
            assert tokenizer.decode(ids, skip) == theirs

    def test_malformed_byte_tokens_do_not_spoil_the_characters_around_them(self) -> None:
        tokenizer = make(gemma_like)
        ids = [3 + byte for byte in [*"你".encode(), 0xFF, *"🙂".encode()]]
        assert tokenizer.decode(ids) == "你�🙂"

    def test_special_tokens_are_skipped_or_shown(self) -> None:
        tokenizer = make(byte_level)
        ids = tokenizer.encode("the<|end|><tool call> fox")
        assert tokenizer.decode(ids) == "the<tool call> fox"
        assert tokenizer.decode(ids, False) == "<|begin|>the<|end|><tool call> fox"

    @pytest.mark.parametrize("kind", BYTE_KINDS + GENERIC_KINDS)
    @pytest.mark.parametrize("token_id", [-1, 151_935, 2**32, 10**30])
    def test_ids_without_a_token_are_empty(self, kind: Kind, token_id: int) -> None:
        tokenizer = make(kind)
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.token_bytes(token_id) == b""


class TestTokenBytes:
    @given(text=texts)
    def test_bytes_joined_are_the_text(self, text: str) -> None:
        for kind in BYTE_KINDS:
            tokenizer = make(kind)
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
            dropped = " " if kind is llama2_like and ids else ""
            assert joined == dropped + tokenizer.decode(ids)

    def test_every_byte_has_a_byte_level_token(self) -> None:
        tokenizer = make(byte_level)
        singles = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        assert {single for single in singles if len(single) == 1} == {
            bytes([byte]) for byte in range(256)
        }

    @pytest.mark.parametrize(
        ("kind", "content", "expected"),
        [
            (byte_level, "Ġthe", b" the"),
            (byte_level, "<|end|>", b"<|end|>"),
            (byte_level, "<tool call>", b"<tool call>"),
            (byte_level, "<｜wide▁token｜>", "<｜wide▁token｜>".encode()),
            (llama2_like, "▁the", b" the"),
            (llama2_like, "世界", "世界".encode()),
            (llama2_like, "<0xE4>", b"\xe4"),
            (llama2_like, "</s>", b"</s>"),
            (wordpiece, "the", b" the"),
            (wordpiece, "##e", b"e"),
            (metaspace, "▁", b" "),
        ],
    )
    def test_examples(self, kind: Kind, content: str, expected: bytes) -> None:
        token_id = tokenizers.Tokenizer.from_str(kind()).token_to_id(content)
        assert token_id is not None
        assert make(kind).token_bytes(token_id) == expected


class TestMinTokens:
    @given(text=texts)
    def test_is_a_lower_bound(self, text: str) -> None:
        for kind in BYTE_KINDS + GENERIC_KINDS:
            tokenizer = make(kind)
            bound = tokenizer.min_tokens(len(text.encode()))
            assert bound <= len(tokenizer.encode(text, add_special_tokens=False))

    def test_grows_with_the_text(self) -> None:
        assert make(byte_level).min_tokens(10**6) > 1000
        assert make(llama2_like).min_tokens(10**6) > 1000

    def test_no_bound_where_a_token_can_stand_for_any_text(self) -> None:
        assert make(wordpiece).min_tokens(10**6) == 0
        incomplete = json.loads(byte_level())
        del incomplete["model"]["vocab"]["A"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(incomplete))
        assert Tokenizer(backend).min_tokens(10**6) == 0


class TestFromFolder:
    def test_names_and_tokens_of_the_config(self, tmp_path: Path, auto_tokenizer: Any) -> None:
        size = make(byte_level).vocab_size
        options = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        config = {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", **options},
            "pad_token": None,
            "added_tokens_decoder": {
                str(size + 1): {"content": "<plain>", "special": False, **options},
                str(size): {"content": "<|tool|>", "special": True, **options},
            },
            "extra_special_tokens": ["<|extra|>"],
        }
        folder = write_folder(tmp_path, byte_level(), config)
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.bos_id == 0
        assert tokenizer.eos_id == size + 2
        assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
        assert tokenizer.special_ids == {0, 1, size, size + 2, size + 3}
        text = "<plain><|tool|><|extra|><|im_end|>"
        assert tokenizer.encode(text) == auto_tokenizer.from_pretrained(folder).encode(text)

    def test_names_from_special_tokens_map(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, llama2_like())
        names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
        tokenizer = Tokenizer.from_folder(folder)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)

    def test_no_names(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(byte_level())
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.bos_id is None
        assert tokenizer.eos_id is None

    def test_converts_vocab_and_merges(self, tmp_path: Path, auto_tokenizer: Any) -> None:
        tokenizers.Tokenizer.from_str(byte_level()).model.save(str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "opt"}')
        config = {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_folder(tmp_path)
        ids = tokenizer.encode("the 你好 fox")
        assert ids == auto_tokenizer.from_pretrained(tmp_path).encode("the 你好 fox")
        assert ids[0] == tokenizer.bos_id == tokenizer.eos_id == 1
        assert tokenizer.decode(ids) == "the 你好 fox"

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({}, "no tokenizer in .*: expected tokenizer.json"),
            ({"tokenizer.json": "{}"}, "cannot read the tokenizer"),
            ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "not valid JSON"),
            ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "not a JSON object"),
            ({"tokenizer.model": "nonsense"}, "cannot convert the tokenizer"),
        ],
    )
    def test_unreadable(self, files: dict[str, str], message: str, tmp_path: Path) -> None:
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        with pytest.raises(ModelError, match=message):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi", True),
        ("<|end|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi", True),
        ("<|end|>once upon a time", False),
        ("once <|im_start|>upon <|im_start|>", False),
        ("<|im_start|>", False),
        ("", False),
    ],
)
def test_where_the_second_message_of_a_chat_begins(text: str, found: bool) -> None:
    tokenizer = Tokenizer(
        tokenizers.Tokenizer.from_str(with_markers(special=("<|im_start|>", "<|im_end|>")))
    )
    ids = tokenizer.encode(text)
    at = tokenizer.first_turn(ids)
    assert (at > 0) == found
    if found:
        assert tokenizer.decode(ids[at:], skip_special_tokens=False) == "<|im_start|>user\nHi"


def test_import_is_cheap() -> None:
    code = "import sys, asyncllm.text; print({'torch', 'transformers'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
