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

With 128,000 tokens a schema compiles in 2 ms and a mask takes 16 us, in the median: a third and a
seventeenth of xgrammar's times (docs/figures.md, examples/bench_grammar.py).
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
