"""Generated text into content, reasoning and tool calls, while it comes.

A model writes its reasoning and its calls as text between markers (``formats``); which ones, its
chat template tells (``choose_formats``). A ``Parser`` takes the text of one sequence in pieces of
any size and returns events.

What the caller must pass: the text *with* the markers. Many of them are special tokens, which a
detokenizer leaves out of the text when ``skip_special_tokens`` is on. So the text has to hold those
that ``visible_special_tokens`` names, and should hold no others; the parser strips what it reads as
markup. Stop strings are to be looked for in content only: ``in_reasoning`` tells.

Decisions, all of them independent of how the text is cut:

- A call begins with the first character of its arguments, in one event with the whole name. Until
  then its text is held back. If it does not fit the format by then, or names a tool that was not
  offered, the call is not made: its text is content, as it was generated, markers included. But if
  the answer was cut off by then (``Parser.finish``), it is left out: what would have become of it
  is not known, and nobody wants to read a marker and half a name.
- Arguments are passed on as generated, whitespace, number formats, escapes and all. Arguments that
  are given as a JSON string are what the string stands for; parameters written one by one become a
  JSON object, their values typed by the tool's schema; missing arguments are ``{}``.
- Arguments that are not JSON are passed on unchanged too, up to the end of the call (in formats
  without one, up to the next call). Arguments that the text's end cuts off stay cut off.
- What follows a call and does not belong to it is content. Whitespace after markup is markup; so
  are a surplus bracket before the marker that ends a call, and the keys of a call that are neither
  name nor arguments.
- Reasoning is the beginning of the text or nothing: its markers are text elsewhere. Markers of
  calls are text within reasoning, and within JSON strings.
"""

from asyncllm.text.parsing.choose import choose_formats, visible_special_tokens
from asyncllm.text.parsing.events import (
    Content,
    End,
    Event,
    Message,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolStart,
    finish_reason,
    message_of,
)
from asyncllm.text.parsing.formats import Formats
from asyncllm.text.parsing.parser import Parser, parse_all
from asyncllm.text.parsing.registry import REASONING_FORMATS, TOOL_FORMATS
from asyncllm.text.parsing.tool_choice import CallStructure, CallTag, call_structure

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "CallStructure",
    "CallTag",
    "Content",
    "End",
    "Event",
    "Formats",
    "Message",
    "Parser",
    "Reasoning",
    "ToolArguments",
    "ToolCall",
    "ToolStart",
    "call_structure",
    "choose_formats",
    "finish_reason",
    "message_of",
    "parse_all",
    "visible_special_tokens",
]
