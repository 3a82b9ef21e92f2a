"""Compiles grammars, off the event loop, and keeps them."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.matcher import Grammar
from asyncllm.text.grammar.spec import GrammarSpec, cache_key
from asyncllm.text.grammar.texts import lark_of
from asyncllm.text.grammar.vocabulary import Vocabulary
from asyncllm.text.tokenizer import Tokenizer

#: What a compiled grammar holds, with what its lexer learns: per byte of its text, and at least.
_BYTES_PER_CHAR = 40
_LEAST_BYTES = 192 * 1024


class GrammarCompiler:
    """Compiles grammars for one model; safe to use from several threads.

    The vocabulary is built with the first grammar.

    Args:
        tokenizer: the model's.
        vocab_size: of the logits; ids that the tokenizer does not have are never allowed.
        eos_ids: tokens that may end a sequence.
        max_grammars, max_bytes: of the grammars kept, the least recently used going first.
        threads: for ``compile_async``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        max_grammars: int = 512,
        max_bytes: int = 256 * 1024 * 1024,
        threads: int = 2,
    ):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, built at first use.

        Raises:
            BadRequest: this model has none that grammars can work with.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    async def compile_async(
        self, spec: GrammarSpec, *, param: str | None = "response_format"
    ) -> Grammar:
        """As ``compile``, in a thread of the compiler's own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: self.compile(spec, param=param))

    def compile(self, spec: GrammarSpec, *, param: str | None = "response_format") -> Grammar:
        """The grammar of a spec: from the cache, or compiled in this thread.

        Takes 1 to 50 ms for schemas as people write them and a second at the very worst, so it
        does not belong on an event loop.

        Raises:
            BadRequest: the spec is malformed, admits nothing, is too complex, or cannot be
                enforced; the message names the keyword and its place, ``param`` is passed on.
        """
        try:
            return self._compile(spec)
        except BadRequest as error:
            raise BadRequest(error.message, param=param) from error

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        key = cache_key(spec)
        with self._lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
            else:
                # Others who want the same meanwhile wait for this future.
                mine = self._grammars[key] = Future[Grammar]()
        if known is not None:
            return known.result()
        try:
            grammar = self._build(spec)
        except BaseException as error:
            with self._lock:
                del self._grammars[key]
            mine.set_exception(error)
            raise
        with self._lock:
            self._num_bytes += grammar.num_bytes
            mine.set_result(grammar)
            self._evict()
        return grammar

    def _evict(self) -> None:
        """Drop what is over the bounds, oldest first; never what is being compiled."""
        for key in list(self._grammars):
            if len(self._grammars) <= self._max_grammars and self._num_bytes <= self._max_bytes:
                return
            if self._grammars[key].done():
                self._num_bytes -= self._grammars.pop(key).result().num_bytes

    def _build(self, spec: GrammarSpec) -> Grammar:
        vocabulary = self.vocabulary
        text = lark_of(spec, vocabulary.special_tokens)
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
        start = llguidance.LLMatcher(
            vocabulary.tokenizer, grammar, log_level=0, limits=oracle.limits()
        )
        # The first mask is the dearest; made here, every matcher starts with what it has learnt.
        mask = np.zeros(vocabulary.num_words, np.int32)
        if not start.is_error():
            start.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if start.is_error():
            raise BadRequest(f"the grammar is not valid: {oracle.first_line(start.get_error())}")
        if start.is_stopped() and not start.is_accepting():
            raise BadRequest("the grammar admits no text")
        return Grammar(start, vocabulary, _LEAST_BYTES + _BYTES_PER_CHAR * len(text))
