"""Small tokenizers of every kind, trained on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import tokenizers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import asyncllm.text

if TYPE_CHECKING:
    from pathlib import Path

#: Makes a tokenizer.json.
Kind: TypeAlias = Callable[[], str]

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "def encode(text: str) -> list[int]:\n    return [1, 2, 3]\n",
    "你好,世界。我们今天去公园散步。你好你好世界世界",
    "naïve café — ça va? Привет, мир! 🙂🙂 👩‍👩‍👧 done.",
] * 5


@cache
def byte_level() -> str:
    """GPT-2, Llama 3, Qwen: every byte has a token; two special tokens and two plain added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("<｜wide▁token｜>")])
    tokenizer.post_processor = _with_bos(tokenizer, "<|begin|>")
    return tokenizer.to_str()


def with_markers(*, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> str:
    """Like ``byte_level``, and with these markers as tokens, special ones or others."""
    tokenizer = Tokenizer.from_str(byte_level())
    tokenizer.add_special_tokens([AddedToken(marker) for marker in special])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in added])
    return tokenizer.to_str()


@cache
def llama2_like() -> str:
    """SentencePiece BPE with byte fallback that drops the first space."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _metaspace_normalizer()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, max_token_length=12)
    trained.train_from_iterator([word for line in CORPUS for word in line.split()], trainer)
    model = json.loads(trained.to_str())["model"]
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *model["vocab"]]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "▁"), *merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = _metaspace_normalizer()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = _with_bos(tokenizer, "<s>")
    return tokenizer.to_str()


@cache
def gemma_like() -> str:
    """Unigram with byte fallback that keeps the first space."""
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.UnigramTrainer(vocab_size=150, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learned = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    special = [("<unk>", 0.0), ("<bos>", 0.0), ("<eos>", 0.0)]
    single_bytes = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    tokenizer = Tokenizer(
        models.Unigram([*special, *single_bytes, *learned], unk_id=0, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([token for token, _ in special])
    tokenizer.post_processor = _with_bos(tokenizer, "<bos>")
    return tokenizer.to_str()


@cache
def wordpiece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@cache
def metaspace() -> str:
    """T5-like: Unigram whose decoder drops the markers of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@cache
def no_decoder() -> str:
    """Words joined by spaces, the library's default."""
    words = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "。": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer.to_str()


def make(kind: Kind) -> asyncllm.text.Tokenizer:
    return asyncllm.text.Tokenizer(tokenizers.Tokenizer.from_str(kind()))


#: Those whose text is just their tokens' bytes, and those whose tokens look at their neighbours.
BYTE_KINDS: list[Kind] = [byte_level, llama2_like, gemma_like]
GENERIC_KINDS: list[Kind] = [wordpiece, metaspace, no_decoder]


def write_folder(folder: Path, tokenizer_json: str, config: dict[str, Any] | None = None) -> Path:
    """A model folder with this tokenizer; ``config`` goes to tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(tokenizer_json, "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _metaspace_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _with_bos(tokenizer: Tokenizer, bos: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
