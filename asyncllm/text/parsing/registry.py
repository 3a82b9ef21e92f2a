"""The known formats by name."""

from __future__ import annotations

from asyncllm.text.parsing.formats import CallTemplate, ChannelFormat, ReasoningFormat, ToolFormat
from asyncllm.text.parsing.tool_formats import TAGGED_FORMATS
from asyncllm.text.reasoning_marks import CHANNEL_ENDS, REASONING_MARKS

HARMONY = ChannelFormat(
    "harmony",  # gpt-oss
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=CHANNEL_ENDS,
    reasoning_channel="analysis",
    template=CallTemplate(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
        separator="<|start|>assistant",
    ),
)

TOOL_FORMATS: dict[str, ToolFormat | ChannelFormat] = {
    form.name: form for form in (*TAGGED_FORMATS, HARMONY)
}
REASONING_FORMATS: dict[str, ReasoningFormat | ChannelFormat] = {
    **{name: ReasoningFormat(name, *marks) for name, marks in REASONING_MARKS.items()},
    HARMONY.name: HARMONY,
}
