"""Structured output: computes which tokens may come next.

A ``GrammarCompiler`` compiles a request's ``GrammarSpec`` off the event loop; each of its sequences
gets a ``Matcher`` of the ``Grammar``; a ``MaskFiller`` writes the masks of a batch while the GPU
runs the forward pass. Only the specs are imported with this package: the library takes 40 ms to
import, with the first grammar (``compiler``, ``matcher``).

    spec -> texts -> (schema/ | regex_parse, regex_tree, regex_write) -> Lark -> library -> Grammar

The library is llguidance (MIT, no dependencies): a lexer by derivatives of regular expressions,
with intersection and complement, below an Earley parser. Its own compiler of JSON schemas only
serves multiples of numbers: ``schema`` brings a schema into a normal form first, so that "not",
"oneOf", "if", "unevaluatedProperties" and the like are enforced, too, or refused by name. A grammar
admits valid texts only; ``schema.writer`` says which valid texts it leaves out.

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

A batch of 64 rows takes 52 us a row with 128k tokens in one thread, 10 us with 2k; meanwhile a
Python thread keeps 97 % of its speed. A matcher takes 3 us, a grammar from the cache 11 us.
xgrammar also needs apache-tvm-ffi, torch, transformers and triton.

On the 55 schemas that both take, compiling and the first mask take 1.6 ms of CPU here and 0.45 ms
with llguidance's own compiler. Some 0.5 ms of this is the lexer for Lark, which the library builds
anew for every text.
"""

from asyncllm.text.grammar.spec import Choice as Choice
from asyncllm.text.grammar.spec import Ebnf as Ebnf
from asyncllm.text.grammar.spec import GrammarSpec as GrammarSpec
from asyncllm.text.grammar.spec import JsonObject as JsonObject
from asyncllm.text.grammar.spec import JsonSchema as JsonSchema
from asyncllm.text.grammar.spec import Regex as Regex
from asyncllm.text.grammar.spec import StructuralTags as StructuralTags
from asyncllm.text.grammar.spec import Tag as Tag
from asyncllm.text.grammar.spec import cache_key as cache_key
