"""Splits generated text into content, reasoning and tool calls, while it comes.

A model writes its reasoning and its calls as text between markers (``formats``); its chat template
tells which (``choose_formats``). A ``Parser`` takes the text of one sequence in pieces of any size
and returns events, which do not depend on how the text is cut.

The text must hold those markers that are special tokens (``visible_special_tokens``) and should
hold no other special tokens. The caller looks for stop strings in content only (``in_reasoning``).

- A call begins with the first character of its arguments, in one event with its whole name. Until
  then its text is held back. Text that does not fit the format by then, or that names a tool which
  was not offered, is content, markers included. If the answer was cut off by then
  (``Parser.finish``), the text is dropped: nobody wants to read a marker and half a name.
- Arguments are passed on as generated, whitespace, number formats and escapes included. Arguments
  written as a JSON string are decoded. Parameters written one by one become a JSON object, typed by
  the tool's schema. Missing arguments are ``{}``.
- Arguments that are not JSON are passed on unchanged, too, up to the end of the call (in formats
  without an end, up to the next call). Arguments that the end of the text cuts off stay cut off.
- Text after a call that does not belong to it is content. Whitespace after markup is markup; so
  are a surplus bracket before the marker that ends a call, and further keys of a JSON call.
- Reasoning comes first or not at all: its markers are text elsewhere. Markers of calls are text
  within reasoning, and within JSON strings.
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
from asyncllm.text.parsing.parser import Parser as Parser
from asyncllm.text.parsing.registry import REASONING_FORMATS as REASONING_FORMATS
from asyncllm.text.parsing.registry import TOOL_FORMATS as TOOL_FORMATS
from asyncllm.text.parsing.tool_choice import CallStructure as CallStructure
from asyncllm.text.parsing.tool_choice import CallTag as CallTag
from asyncllm.text.parsing.tool_choice import call_structure as call_structure
