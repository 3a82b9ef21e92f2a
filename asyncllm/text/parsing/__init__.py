"""Splits generated text into content, reasoning and tool calls, while it comes.

A model writes its reasoning and its calls as text between markers (``formats``); its chat template
is asked which (``choose_formats``). A ``Parser`` takes the text of one sequence in pieces of any
size and returns events, which do not depend on how the text is cut.

The text must hold those markers that are special tokens (``visible_special_tokens``) and should
hold no other special tokens. The caller looks for stop strings in content only (``in_reasoning``).

- A call begins with its arguments, in one event with its whole name. Until then its text is held
  back. If the answer was cut off by then (``Parser.finish``), that text is dropped: nobody wants to
  read a marker and half a name.
- Arguments are always a JSON object. JSON comes out as it was generated, whitespace, number formats
  and escapes included; what is not JSON is mended (``literal``), and where the text ends, or the
  next call begins, all that is open is closed. So a call that was cut off has arguments, too: its
  ``finish_reason`` is "length", and nobody should make it. Parameters written one by one are typed
  by the tool's schema. No arguments, null, "" and [] are ``{}``.
- A parameter's text ends at its closing marker if what belongs behind that follows: a value may
  contain the marker, and whole calls. While this is open, the text is held back.
- What is written like a call is content without its markup if it names no tool that was offered, or
  if its arguments are no object. The calls beside it are calls.
- Markers are never content. Of those that are also ordinary text, such as a fence, this holds only
  if a call follows. Whitespace after a call is markup; so are a surplus bracket before the marker
  that ends a call, and further keys of a JSON call.
- Reasoning comes first or not at all: its markers are text elsewhere. Calls within it are made only
  if the answer ends with them, whether its end follows or not. Markers within strings are text.
"""

from asyncllm.text.parsing.choose import choose_formats as choose_formats
from asyncllm.text.parsing.choose import visible_special_tokens as visible_special_tokens
from asyncllm.text.parsing.events import Content as Content
from asyncllm.text.parsing.events import End as End
from asyncllm.text.parsing.events import Event as Event
from asyncllm.text.parsing.events import Message as Message
from asyncllm.text.parsing.events import Reasoning as Reasoning
from asyncllm.text.parsing.events import ToolArguments as ToolArguments
from asyncllm.text.parsing.events import ToolCall as ToolCall
from asyncllm.text.parsing.events import ToolStart as ToolStart
from asyncllm.text.parsing.events import finish_reason as finish_reason
from asyncllm.text.parsing.events import message_of as message_of
from asyncllm.text.parsing.formats import Formats as Formats
from asyncllm.text.parsing.known_formats import REASONING_FORMATS as REASONING_FORMATS
from asyncllm.text.parsing.known_formats import TOOL_FORMATS as TOOL_FORMATS
from asyncllm.text.parsing.parser import Parser as Parser
from asyncllm.text.parsing.writing import CallStructure as CallStructure
from asyncllm.text.parsing.writing import CallTag as CallTag
from asyncllm.text.parsing.writing import call_structure as call_structure
from asyncllm.text.parsing.writing import calls_writer as calls_writer
