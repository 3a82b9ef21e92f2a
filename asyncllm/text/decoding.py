"""Token ids to text, whole or token by token, for each kind of tokenizer decoder."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Makes the text of one sequence, token by token.

    The results of ``push`` and ``finish``, joined, are the text of the tokens. A character is never
    split; one that is incomplete at the end is left out.
    """

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that has become certain, maybe ""."""
        ...

    def finish(self) -> str:
        """Return the text held back. Nothing may be pushed afterwards."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are plain byte strings."""

    __slots__ = ("_bytes_of", "_incomplete", "_strip_first_space")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip_first_space: bool):
        self._bytes_of = bytes_of
        self._strip_first_space = strip_first_space
        self._incomplete = b""

    def push(self, token_id: int) -> str:
        # Like codecs.getincrementaldecoder("utf-8"), without its Python layer.
        data = self._incomplete + self._bytes_of[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        if self._strip_first_space and text:
            self._strip_first_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""  # only an incomplete character can be left


class WindowDetokenizer:
    """For any other decoder: decodes a short window of tokens and returns the new text.

    Exact for every decoder that only appends text, and looks back no further than the tokens of the
    previous delivery.
    """

    # A character has at most 4 bytes, hence 4 tokens: a U+FFFD after that many is in the text.
    _MAX_HELD = 4

    __slots__ = ("_context", "_decode", "_delivered", "_visible", "_window")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        visible: Callable[[int], bool],
        context: list[int],
    ):
        self._decode = decode
        self._visible = visible
        self._window = context  # tokens delivered last, then the tokens held back
        self._context = len(context)  # how many of them are delivered
        self._delivered = len(decode(context))  # characters of text these stand for

    def push(self, token_id: int) -> str:
        if not self._visible(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._context
        if text.endswith("\N{REPLACEMENT CHARACTER}") and held < self._MAX_HELD:
            return ""
        new = text[self._delivered :]
        if new:
            del self._window[: self._context]
            self._context = len(self._window)
            self._delivered = len(self._decode(self._window))
        return new

    def finish(self) -> str:
        text = self._decode(self._window).rstrip("\N{REPLACEMENT CHARACTER}")
        return text[self._delivered :]


def decoding_of(backend: tokenizers.Tokenizer) -> ByteDecoding | GenericDecoding:
    """The fastest exact decoding for this tokenizer."""
    spelling = spelling_of(backend.decoder)
    if spelling is None:
        return GenericDecoding(backend)
    return ByteDecoding(backend, spelling)


class Spelling(msgspec.Struct, frozen=True):
    """How a decoder spells tokens as bytes, if a text is the concatenation of its tokens' bytes.

    Attributes:
        spell: a token's content -> the bytes it adds to the text.
        single_bytes: the contents of the tokens for the bytes 0 to 255.
        strip_first_space: a space at the very beginning of a text is dropped.
    """

    spell: Callable[[str], bytes]
    single_bytes: tuple[str, ...]
    strip_first_space: bool = False


def spelling_of(decoder: Decoder | None) -> Spelling | None:
    """The spelling a decoder follows; None for decoders that look at a token's neighbours.

    Two pipelines cover nearly every generative model: the byte-level alphabet (GPT-2, OPT, Llama 3,
    Qwen) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma).
    """
    match _steps(decoder):
        case [{"type": "ByteLevel"}]:
            return _byte_level()
        case [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ] if strip in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
            return _byte_fallback(strip_first_space=bool(strip))
    return None


def _steps(decoder: Decoder | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_level() -> Spelling:
    # GPT-2's alphabet: printable Latin-1 characters are themselves, the 68 other bytes are
    # numbered from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = tuple(
        chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)
    )
    byte_of = {char: byte for byte, char in enumerate(alphabet)}

    def spell(content: str) -> bytes:
        try:
            return bytes([byte_of[char] for char in content])
        except KeyError:  # an added token, not written in the alphabet
            return content.encode()

    return Spelling(spell, alphabet)


def _byte_fallback(*, strip_first_space: bool) -> Spelling:
    def spell(content: str) -> bytes:
        if byte := _BYTE_TOKEN.fullmatch(content):
            return bytes.fromhex(byte[1])
        return content.replace("▁", " ").encode()

    return Spelling(spell, tuple(f"<0x{byte:02X}>" for byte in range(256)), strip_first_space)


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to the text; filled on demand, as every new token reads it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, spell: Callable[[str], bytes], hidden: frozenset[int]
    ):
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        content = content_of(self._backend, token_id)
        if content is None:
            return b""  # not stored: ids without a token are unlimited
        spelled = self[token_id] = self._spell(content)
        return spelled


class ByteDecoding:
    """Decoding by joining bytes.

    The text is the UTF-8 of the bytes, malformed bytes becoming U+FFFD. The tokenizers library
    agrees except for byte fallback: there one malformed byte spoils the whole run of byte tokens
    around it, characters already delivered included.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling):
        self._strip_first_space = spelling.strip_first_space
        self._all = TokenBytes(backend, spelling.spell, frozenset())
        self._special_ids = special_ids(backend)

        # A model needs one or two of these: the tokens shown depend on its formats.
        @lru_cache(maxsize=8)
        def without_special(shown: tuple[int, ...]) -> TokenBytes:
            return TokenBytes(backend, spelling.spell, self._special_ids.difference(shown))

        self._without_special = without_special
        #: No token's text is longer; None when a token can stand for a text of any length.
        self.max_token_bytes = _max_token_bytes(backend, spelling)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        table = self._table(skip_special)
        text = b"".join([table[token_id] for token_id in token_ids]).decode(errors="replace")
        return text.removeprefix(" ") if self._strip_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        return self._all[token_id]

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, shown: tuple[int, ...] = ()
    ) -> ByteDetokenizer:
        table = self._table(skip_special, shown)
        strip = self._strip_first_space and not any(table[token_id] for token_id in prompt_ids)
        return ByteDetokenizer(table, strip_first_space=strip)

    def _table(self, skip_special: bool, shown: tuple[int, ...] = ()) -> TokenBytes:
        return self._without_special(shown) if skip_special else self._all


class GenericDecoding:
    """Decoding by the tokenizers library, for decoders that look at a token's neighbours."""

    #: Tokens of context, so that the first new token is not decoded like the first of a text.
    CONTEXT = 4

    max_token_bytes: int | None = None  # an unknown word of any length is one token

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._special_ids = special_ids(backend)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        return self._decode([i for i in token_ids if self._visible(i, skip_special)])

    def token_bytes(self, token_id: int) -> bytes:
        if not self._visible(token_id, skip_special=False):
            return b""
        # The bytes that it adds behind itself: the first token of a text may be decoded otherwise.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :].encode()

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, shown: tuple[int, ...] = ()
    ) -> WindowDetokenizer:
        def visible(token_id: int) -> bool:
            return self._visible(token_id, skip_special and token_id not in shown)

        context = list(islice(filter(visible, reversed(prompt_ids)), self.CONTEXT))[::-1]
        return WindowDetokenizer(self._decode, visible, context)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _visible(self, token_id: int, skip_special: bool) -> bool:
        if skip_special and token_id in self._special_ids:
            return False
        return content_of(self._backend, token_id) is not None


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens that ``skip_special_tokens`` leaves out of a text."""
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def content_of(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    """The content of a token; None for ids without a token."""
    in_range = 0 <= token_id < 1 << 32  # the library's integer type
    return backend.id_to_token(token_id) if in_range else None


def _max_token_bytes(backend: tokenizers.Tokenizer, spelling: Spelling) -> int | None:
    if any(backend.token_to_id(content) is None for content in spelling.single_bytes):
        return None  # some bytes have no token: text may vanish or collapse into one unknown token
    # Spelling never lengthens a token, so this holds for its text too; spelling 150,000 tokens to
    # find the true maximum would cost 0.1 s at start-up.
    return max(len(content.encode()) for content in backend.get_vocab())
