"""Compiles grammars, off the event loop, and keeps them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final
from weakref import WeakValueDictionary

import llguidance
import numpy as np

from asyncllm.errors import BadRequest, QueueFull
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import MAX_COMPILE_SECONDS, Budget, TooSlow
from asyncllm.text.grammar.matcher import MOST_EXCESS, Grammar, Vocabulary
from asyncllm.text.grammar.spec import Ebnf, GrammarSpec, Regex, cache_key
from asyncllm.text.grammar.texts import lark_of
from asyncllm.text.tokenizer import Tokenizer

#: Memory of a compiled grammar and its lexer's states: per byte of its text, and at least.
_BYTES_PER_CHAR = 40
_LEAST_BYTES = 192 * 1024
#: A grammar that takes longer is compiled in a thread of its own, so that others need not wait.
_QUICK_SECONDS: Final = 0.1
#: Grammars that may wait for that thread.
_MOST_SLOW: Final = 16
#: Tokens over which grammars written by hand are tried out: some cost nothing at first.
_TRIAL_TOKENS: Final = 4


class GrammarCompiler:
    """Compiles grammars for one model; safe to use from several threads.

    The vocabulary is built with the first grammar. A grammar is kept while anybody has it, and for
    some time after.

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
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._alive: WeakValueDictionary[bytes, Grammar] = WeakValueDictionary()
        self._pending: dict[bytes, Future[Grammar]] = {}
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="slow-grammar")
        self._num_slow = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, built at first use.

        Raises:
            BadRequest: grammars cannot work with this model's vocabulary.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    def known(self, key: bytes) -> Grammar:
        """A grammar that was compiled before.

        Raises:
            LookupError: it is no longer kept.
        """
        return self._alive[key]

    async def compile_async(
        self, spec: GrammarSpec, *, param: str | None = "response_format"
    ) -> Grammar:
        """Like ``compile``, in the compiler's own threads.

        Raises:
            QueueFull: it takes long, and too many others that take long are waiting.
        """
        loop = asyncio.get_running_loop()
        try:
            pending = await loop.run_in_executor(self._pool, self._start, spec)
            # Others may wait for it, too: giving up must not cancel it.
            return await asyncio.shield(asyncio.wrap_future(pending))
        except BadRequest as error:
            raise BadRequest(error.message, param=param) from error

    def compile(self, spec: GrammarSpec, *, param: str | None = "response_format") -> Grammar:
        """The grammar of a spec: from the cache, or compiled in this thread.

        Takes 1 to 50 ms for schemas as people write them and a second at the very worst, so it
        does not belong on an event loop.

        Raises:
            BadRequest: the spec is malformed, admits nothing, is too complex, or cannot be
                enforced; the message names the keyword and its place, ``param`` is passed on.
        """
        try:
            key = cache_key(spec)
            pending, is_mine = self._claim(key)
            if is_mine:
                self._fulfil(key, spec, pending, MAX_COMPILE_SECONDS)
            return pending.result()
        except BadRequest as error:
            raise BadRequest(error.message, param=param) from error

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._slow_pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, spec: GrammarSpec) -> Future[Grammar]:
        """The grammar of a spec: done, or being compiled in the thread for slow ones."""
        key = cache_key(spec)
        pending, is_mine = self._claim(key)
        if is_mine:
            try:
                self._fulfil(key, spec, pending, _QUICK_SECONDS, give_up=False)
            except TooSlow:
                self._continue_slowly(key, spec, pending)
        return pending

    def _continue_slowly(self, key: bytes, spec: GrammarSpec, pending: Future[Grammar]) -> None:
        def work() -> None:
            try:
                self._fulfil(key, spec, pending, MAX_COMPILE_SECONDS)
            finally:
                with self._lock:
                    self._num_slow -= 1

        with self._lock:
            full = self._num_slow >= _MOST_SLOW
            self._num_slow += not full
        if full:
            message = "too many large grammars are being compiled"
            self._fail(key, pending, QueueFull(message, retry_after=MAX_COMPILE_SECONDS))
        else:
            self._slow_pool.submit(work)

    def _claim(self, key: bytes) -> tuple[Future[Grammar], bool]:
        """The future of a grammar, and whether the caller has to compile it."""
        with self._lock:
            if (pending := self._pending.get(key)) is not None:
                return pending, False
            pending = Future[Grammar]()
            grammar = self._alive.get(key)
            if grammar is None:
                self._pending[key] = pending
                return pending, True
            self._keep(grammar)
        pending.set_result(grammar)
        return pending, False

    def _fulfil(
        self,
        key: bytes,
        spec: GrammarSpec,
        pending: Future[Grammar],
        seconds: float,
        *,
        give_up: bool = True,
    ) -> None:
        """Compile a claimed grammar; its future gets the grammar or the error.

        Raises:
            TooSlow: it takes longer than ``seconds``, and ``give_up`` is false.
        """
        try:
            grammar = self._build(key, spec, seconds)
        except TooSlow as error:
            if not give_up:
                raise
            self._fail(key, pending, error)
        except RecursionError:
            self._fail(key, pending, BadRequest("the grammar is nested too deep"))
        except BaseException as error:
            self._fail(key, pending, error)
        else:
            with self._lock:
                self._alive[key] = grammar
                self._keep(grammar)
                del self._pending[key]
            pending.set_result(grammar)

    def _fail(self, key: bytes, pending: Future[Grammar], error: BaseException) -> None:
        with self._lock:
            del self._pending[key]
        pending.set_exception(error)

    def _keep(self, grammar: Grammar) -> None:
        """Mark a grammar as used last; drop the least recently used beyond the bounds."""
        if grammar.key not in self._kept:
            self._num_bytes += grammar.num_bytes
        self._kept[grammar.key] = grammar
        self._kept.move_to_end(grammar.key)
        while len(self._kept) > self._max_grammars or self._num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def _build(self, key: bytes, spec: GrammarSpec, seconds: float) -> Grammar:
        vocabulary = self.vocabulary
        text = lark_of(spec, vocabulary.special_tokens, Budget(seconds))
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
        start = llguidance.LLMatcher(
            vocabulary.tokenizer, grammar, log_level=0, limits=oracle.limits()
        )
        # The first mask costs most: computed here, every matcher starts with its lexer states.
        mask = np.zeros(vocabulary.num_words, np.int32)
        if not start.is_error():
            start.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if start.is_error():
            problem = oracle.error_text(start.get_error())
            costly = problem.startswith(oracle.TOO_COSTLY)
            raise BadRequest(problem if costly else f"the grammar is not valid: {problem}")
        if start.is_stopped() and not start.is_accepting():
            raise BadRequest("the grammar admits no text")
        if isinstance(spec, Ebnf | Regex):
            _try_out(start, mask)
        return Grammar(key, start, vocabulary, _LEAST_BYTES + _BYTES_PER_CHAR * len(text))


def _try_out(start: llguidance.LLMatcher, mask: np.ndarray) -> None:
    """Accept some tokens, to refuse a costly grammar here before it delays other requests.

    Raises:
        BadRequest: that takes more time than a sequence may.
    """
    trial, row = start.deep_copy(), mask.copy()
    begun = time.thread_time()
    for index in range(_TRIAL_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if trial.is_stopped() or not len(allowed):
            return
        trial.consume_token(int(allowed[(index + 1) * len(allowed) // (_TRIAL_TOKENS + 1)]))
        trial.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if time.thread_time() - begun > MOST_EXCESS / 2:
            raise BadRequest("the grammar is too costly: its masks take too long")
