"""The known formats by name."""

from __future__ import annotations

from asyncllm.text.parsing.formats import CallTemplate, ChannelFormat, ReasoningFormat, ToolFormat
from asyncllm.text.parsing.tool_formats import TAGGED_FORMATS

HARMONY = ChannelFormat(
    "harmony",  # gpt-oss
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning_channel="analysis",
    namespace="functions.",
    template=CallTemplate(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
        separator="<|start|>assistant",
    ),
)

_REASONING = (
    ReasoningFormat("think", ("<think>",), ("</think>",)),  # Qwen 3, DeepSeek R1, many others
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),  # Magistral
    ReasoningFormat(
        "granite",  # 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat("granite_tags", ("<think>",), ("</think>",), ("<response>", "</response>")),
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        "command",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    HARMONY,
)

TOOL_FORMATS: dict[str, ToolFormat | ChannelFormat] = {
    form.name: form for form in (*TAGGED_FORMATS, HARMONY)
}
REASONING_FORMATS: dict[str, ReasoningFormat | ChannelFormat] = {
    form.name: form for form in _REASONING
}
