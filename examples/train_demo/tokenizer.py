"""The demo model's tokenizer: byte-level BPE with a small vocabulary.

Frequent words are one token each. All other words are split into letters *before* BPE sees them,
so a tiny model reads ``plorvan`` letter by letter and can spell, reverse and copy words that it
has never met. Digits stand alone, and text outside ASCII is left as bytes: nothing in it is worth
a token here, and a server gets to see characters that arrive in pieces.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Whole in the vocabulary as in Qwen3, but part of the text that a client sees.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def _alternatives(words: list[str]) -> str:
    """Write ``words`` as a pattern that shares prefixes, so that a match does not try each word."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        options = [letter + pattern(rest) for letter, rest in sorted(node.items()) if letter]
        if not options:
            return ""
        joined = options[0] if len(options) == 1 and "" not in node else f"(?:{'|'.join(options)})"
        return joined + ("?" if "" in node else "")

    return pattern(tree)


def split_pattern(words: list[str], space: str = " ?") -> str:
    """Build the pattern that cuts a text into the pieces within which BPE may merge."""
    return "|".join([
        # The end of a short form, as in "what's"; not the quote before a quoted word.
        r"(?<=\p{L})'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
        # A known word with the space before it, and nothing but whole words.
        rf"{space}(?<!\p{{L}})(?:{_alternatives(words)})(?!\p{{L}})",
        r"\p{L}",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ])  # fmt: skip


def frequent_words(texts: list[str], count: int) -> list[str]:
    """Return the ``count`` most frequent words of two and more ASCII letters."""
    found = Counter(word for text in texts for word in re.findall(r"[A-Za-z]{2,}", text))
    return [word for word, _ in found.most_common(count)]


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def train_tokenizer(texts: list[str], words: int) -> Tokenizer:
    """Train a tokenizer that keeps the ``words`` most frequent words of ``texts`` whole."""
    known = frequent_words(texts, words)
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = _pre_tokenizer(split_pattern(known, space=""))
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 14,  # the pieces run out long before
        min_frequency=20,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    ascii_only = (re.sub(r"[^\x00-\x7f]", "", text) for text in texts)
    draft.train_from_iterator(ascii_only, trainer)
    model = json.loads(draft.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges: list[tuple[str, str]] = [(left, right) for left, right in model["merges"]]
    # The word with its space comes last, so both forms of every word are one token: had BPE
    # learned " letter" by itself, "letter" at the start of a text would be pieces.
    after_space = Counter(word for text in texts for word in re.findall(r" ([A-Za-z]{2,})", text))
    for word in known:
        if word in vocabulary and after_space[word] >= 5:
            merges.append(("Ġ", word))
            vocabulary["Ġ" + word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(split_pattern(known))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def build(samples: int, words: int, seed: int = 1) -> Tokenizer:
    """Train the tokenizer on ``samples`` generated texts."""
    from data import text

    rng = random.Random(seed)
    texts = [re.sub(r"<\|?/?[a-z_]+\|?>", " ", text(rng)) for _ in range(samples)]
    return train_tokenizer(texts, words)


def settings(chat_template: str, max_length: int) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``."""
    return {
        # The plain class: Qwen's own would replace the split pattern by its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": chat_template,
    }
