"""Structured output: which tokens may come next.

A request's ``GrammarSpec`` is compiled off the event loop by a ``GrammarCompiler``; each of its
sequences gets a ``Matcher`` of the resulting ``Grammar``; a ``MaskFiller`` writes the masks of a
batch while the GPU runs the forward pass.

Only the specs are imported with this package: a server knows them from the start, and needs the
library, which takes 40 ms to import, with the first grammar (``compiler``, ``matcher``).

    spec -> texts -> (schema/ | regex_parse, regex_tree) -> Lark -> library -> Grammar -> Matcher

The library is llguidance (MIT, no dependencies): a lexer by derivatives of regular expressions,
with intersection and complement, below an Earley parser. Its own compiler of JSON schemas is used
for multiples of numbers only: ``schema`` brings a schema into a normal form first, so that also
"not", "oneOf", "if", "unevaluatedProperties" and their like are enforced, or refused by name. What
a grammar admits is valid, always; what it leaves out of the valid is said in ``schema.writer``.

Measured with examples/bench_grammar.py on a core of an EPYC, llguidance 1.9.1 against xgrammar
0.2.8 (one thread, no flexible whitespace): 76 schemas and random outputs, and the 327 schemas of
the official JSON-Schema-Test-Suite, draft 2020-12, that admit objects.

    ======================================  ==========  ==========  ================
                                            here        xgrammar    llguidance's own
    ======================================  ==========  ==========  ================
    compile, ms, 2k tokens: median, max     1.8, 20     0.7, 28
    compile, ms, 128k tokens: median, max   2.0, 19     6.2, 1800
    mask, us, 2k tokens: median, 99 %       4.7, 88     2.2, 152
    mask, us, 128k tokens: median, 99 %     16, 1100    270, 6100
    suite: valid, wrong, refused            305, 0, 22  273, 37, 17  137, 0, 187
    ======================================  ==========  ==========  ================

A batch of 64 rows takes 52 us a row with 128k tokens in one thread, 10 us with 2k; a Python thread
beside keeps 97 % of its speed. A matcher costs 3 us, a grammar from the cache 11 us. xgrammar needs
apache-tvm-ffi, torch, transformers and triton beside it.
"""

from asyncllm.text.grammar.spec import (
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

__all__ = [
    "Choice",
    "Ebnf",
    "GrammarSpec",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "StructuralTags",
    "Tag",
    "cache_key",
]
