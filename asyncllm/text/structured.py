"""Structured output of one model: grammars for requests, and matchers for their sequences.

Requests come in on the event loop, sequences are sampled in the executor's thread; both share the
compiled grammars.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.system.daemon_thread import run_in_daemon
from asyncllm.text.grammar import GrammarSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from asyncllm.text.grammar.compiler import GrammarCompiler
    from asyncllm.text.grammar.matcher import Grammar, MaskFiller, Matcher
    from asyncllm.text.tokenizer import Tokenizer

#: Threads that fill masks, at most; one mask takes some tens of microseconds.
MAX_THREADS = 8


class StructuredOutput:
    """Works once it is ``open``; the grammar library is imported with the first grammar."""

    def __init__(self) -> None:
        self._model: tuple[Tokenizer, int, tuple[int, ...]] | None = None
        self._compiler: GrammarCompiler | None = None
        self._filler: MaskFiller | None = None
        self._opening = threading.Lock()

    def open(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """The model is known; ``vocab_size`` is that of its logits."""
        self._model = tokenizer, vocab_size, eos_ids

    async def compile(self, spec: Any) -> Grammar:
        """The grammar of a ``GrammarSpec``; compiled once, off the loop.

        Sequences can be sampled under it as long as the caller keeps it.

        Raises:
            BadRequest: the spec has no grammar, or this model does not support grammars.
            QueueFull: too many large grammars are being compiled.
        """
        compiler = self._compiler
        if compiler is None:
            compiler = await run_in_daemon(self._open_compiler)
        if not isinstance(spec, GrammarSpec):
            raise BadRequest("grammar must be a GrammarSpec", param="grammar")
        return await compiler.compile_async(spec, param="grammar")

    def matcher(self, grammar: bytes) -> Matcher:
        """A matcher at the start of the grammar with this key, which was compiled before.

        Raises:
            LookupError: the grammar is no longer kept.
        """
        return self._open_compiler().known(grammar).matcher()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""
        assert self._model is not None, "requests come when the model is known"
        return self._model[0].token_bytes(token)

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        """Write the masks of the next tokens; int32 [len(matchers), ceil(vocab / 32)]."""
        if self._filler is None:
            from asyncllm.text.grammar.matcher import MaskFiller

            threads = min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
            self._filler = MaskFiller(self._open_compiler().vocabulary, threads=threads)
        self._filler.fill_rows(matchers, masks)

    def close(self) -> None:
        """Stop the threads. Closing twice is fine."""
        if self._compiler is not None:
            self._compiler.close()

    def _open_compiler(self) -> GrammarCompiler:
        with self._opening:
            if self._compiler is None:
                from asyncllm.text.grammar.compiler import GrammarCompiler

                assert self._model is not None, "requests come when the model is known"
                self._compiler = GrammarCompiler(*self._model)
            return self._compiler
