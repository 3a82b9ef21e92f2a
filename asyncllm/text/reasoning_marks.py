"""The markers around reasoning, by the names of their formats."""

from __future__ import annotations

from typing import Final

#: The markers that begin it, any of several; those that end it; those around the answer behind it.
REASONING_MARKS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]] = {
    "think": (("<think>",), ("</think>",), ()),  # Qwen 3, DeepSeek R1, many others
    "mistral": (("[THINK]",), ("[/THINK]",), ()),  # Magistral
    "granite": (  # 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        (),
    ),
    "granite_tags": (("<think>",), ("</think>",), ("<response>", "</response>")),
    "seed_oss": (("<seed:think>",), ("</seed:think>",), ()),
    "gemma4": (("<|channel>thought",), ("<channel|>",), ()),
    "command": (
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
}
#: The markers that end a message on a channel, as gpt-oss writes them.
CHANNEL_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
