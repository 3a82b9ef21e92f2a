"""The formats we know by name: how families of models write tool calls and reasoning."""

from __future__ import annotations

from msgspec.structs import replace

from asyncllm.text.parsing.formats import (
    CallSyntax,
    CallTemplate,
    ChannelFormat,
    JsonBody,
    NamedBody,
    ParameterStyle,
    ReasoningFormat,
    ToolFormat,
)
from asyncllm.text.reasoning import CHANNEL_ENDS, REASONING_MARKS


def _written(call: str, *, begin: str = "", separator: str = "", end: str = "") -> CallTemplate:
    """A template from a call's text, with $name and $args in their places."""
    before_name, rest = call.split("$name")
    after_name, after_arguments = rest.split("$args")
    return CallTemplate(before_name, after_name, after_arguments, begin, separator, end)


_JSON = JsonBody()
_PYTHON = NamedBody(in_python=True)
_BARE = JsonBody(other_keys=("type", "id"), needs_arguments=True)
_BARE_CALL = CallSyntax("", json=_BARE)
_FENCED = CallSyntax("```json", json=_BARE, end=("```",))
_FUNCTOOLS = CallSyntax("functools", json=_JSON)  # what Microsoft's prompts ask for
_QWEN_PARAMETERS = ParameterStyle("<parameter=", ">", "", "</parameter>", own_lines=True)
_QWEN_FUNCTION = NamedBody(head="<function=", name_end=">", parameters=_QWEN_PARAMETERS)
_SEED_PARAMETERS = replace(_QWEN_PARAMETERS, own_lines=False)
_GLM_PARAMETERS = ParameterStyle(
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", own_lines=False
)
_MINIMAX_PARAMETERS = ParameterStyle("<parameter name=", ">", "", "</parameter>", own_lines=False)
# Most families write the object; models trained on several write the other form as well.
_TOOL_CALL = CallSyntax(
    "<tool_call>",
    json=_JSON,
    named=replace(_QWEN_FUNCTION, end=("</function>",)),
    end=("</tool_call>",),
)
_PIPED_CALL = CallSyntax("<|tool_call|>", json=_JSON, end=("<|/tool_call|>",))
_GEMMA_CALL = NamedBody(head="call:", quote='<|"|>')
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISTRAL_CALLS = (
    CallSyntax("[TOOL_CALLS]", json=_JSON, named=NamedBody("[ARGS]", call_id="[CALL_ID]")),
)
_OBJECT = '{"name": "$name", "arguments": $args}'

#: The format for models of which nothing is known.
GENERIC = "json"

_TAGGED_FORMATS = (
    ToolFormat(
        "hermes",  # Qwen 2.5 and 3, Hermes 2 and 3, Granite 4
        calls=(_TOOL_CALL,),
        template=_written(f"<tool_call>\n{_OBJECT}\n</tool_call>", separator="\n"),
    ),
    ToolFormat(
        "qwen3_coder",
        calls=(
            CallSyntax(
                "<tool_call>", json=_JSON, named=_QWEN_FUNCTION, end=("</function>", "</tool_call>")
            ),
            # The models leave out the first tag at times.
            CallSyntax(
                "<function=",
                named=NamedBody(name_end=">", parameters=_QWEN_PARAMETERS),
                end=("</function>", "</tool_call>"),
            ),
        ),
        template=_written(
            "<tool_call>\n<function=$name>\n$args\n</function>\n</tool_call>", separator="\n"
        ),
    ),
    ToolFormat(
        "seed_oss",
        calls=(
            CallSyntax(
                "<seed:tool_call>",
                json=_JSON,
                named=replace(_QWEN_FUNCTION, parameters=_SEED_PARAMETERS),
                end=("</function>", "</seed:tool_call>"),
            ),
        ),
        template=_written(
            "<seed:tool_call>\n<function=$name>\n$args\n</function>\n</seed:tool_call>",
            separator="\n",
        ),
    ),
    ToolFormat(
        "glm45",
        calls=(
            CallSyntax(
                "<tool_call>",
                json=_JSON,
                named=NamedBody(parameters=_GLM_PARAMETERS),
                end=("</tool_call>",),
            ),
        ),
        template=_written("<tool_call>$name\n$args\n</tool_call>", separator="\n"),
    ),
    ToolFormat(
        "minimax_m2",
        calls=(
            CallSyntax(
                "<invoke name=",
                named=NamedBody(name_end=">", parameters=_MINIMAX_PARAMETERS),
                end=("</invoke>",),
            ),
        ),
        ignored=("<minimax:tool_call>", "</minimax:tool_call>"),
        template=_written(
            '<invoke name="$name">\n$args\n</invoke>',
            begin="<minimax:tool_call>\n",
            separator="\n",
            end="\n</minimax:tool_call>",
        ),
    ),
    ToolFormat(
        "llama3_json",
        calls=(
            _BARE_CALL,
            CallSyntax("<|python_tag|>", json=_JSON, named=replace(_PYTHON, name_end=".call")),
            _FENCED,
            # What the model card of Llama 3.1 asks of custom tools.
            CallSyntax("<function=", named=NamedBody(name_end=">"), end=("</function>",)),
        ),
        separators=";",
        template=_written('{"name": "$name", "parameters": $args}', separator="; "),
    ),
    ToolFormat(
        "mistral",
        calls=_MISTRAL_CALLS,
        call_ids="short",
        template=_written(_OBJECT, begin="[TOOL_CALLS][", separator=", ", end="]"),
    ),
    ToolFormat(
        "mistral_args",  # a marker for every call, since their tokenizer of version 11
        calls=_MISTRAL_CALLS,
        call_ids="short",
        template=_written("[TOOL_CALLS]$name[ARGS]$args"),
    ),
    ToolFormat(
        "deepseek_v3",  # and R1
        calls=(
            CallSyntax(
                "<｜tool▁call▁begin｜>",
                named=NamedBody(head="function<｜tool▁sep｜>", name_end="```json"),
                end=("```", "<｜tool▁call▁end｜>"),
            ),
        ),
        ignored=_DEEPSEEK_SECTION,
        template=_written(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$args\n```<｜tool▁call▁end｜>",
            begin=_DEEPSEEK_SECTION[0],
            separator="\n",
            end=_DEEPSEEK_SECTION[1],
        ),
    ),
    ToolFormat(
        "deepseek_v31",
        calls=(
            CallSyntax(
                "<｜tool▁call▁begin｜>",
                named=NamedBody(name_end="<｜tool▁sep｜>"),
                end=("<｜tool▁call▁end｜>",),
            ),
        ),
        ignored=_DEEPSEEK_SECTION,
        template=_written(
            "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$args<｜tool▁call▁end｜>",
            begin=_DEEPSEEK_SECTION[0],
            end=_DEEPSEEK_SECTION[1],
        ),
    ),
    ToolFormat(
        "kimi_k2",
        calls=(
            CallSyntax(
                "<|tool_call_begin|>",
                named=NamedBody(name_end="<|tool_call_argument_begin|>"),
                end=("<|tool_call_end|>",),
            ),
        ),
        ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_ids="named",
        template=_written(
            "<|tool_call_begin|>functions.$name:0<|tool_call_argument_begin|>$args<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(
        "granite",  # 3.x, which writes either marker, or none
        calls=(_PIPED_CALL, _TOOL_CALL, _BARE_CALL, _FENCED),
        template=_written(_OBJECT, begin="<|tool_call|>[", separator=", ", end="]"),
    ),
    ToolFormat(
        "phi4_mini",
        calls=(_PIPED_CALL, _FUNCTOOLS, _BARE_CALL, _FENCED),
        template=_written(_OBJECT, begin="<|tool_call|>[", separator=", ", end="]<|/tool_call|>"),
    ),
    ToolFormat(
        "nemotron",  # Nano 2, Super 1.5
        calls=(CallSyntax("<TOOLCALL>", json=_JSON, end=("</TOOLCALL>",)),),
        template=_written(_OBJECT, begin="<TOOLCALL>[", separator=", ", end="]</TOOLCALL>"),
    ),
    ToolFormat(
        "olmo3",
        calls=(
            CallSyntax("<function_calls>", json=_JSON, named=_PYTHON, end=("</function_calls>",)),
        ),
        template=_written(
            "$name(**$args)", begin="<function_calls>", separator="\n", end="</function_calls>"
        ),
    ),
    ToolFormat(
        "pythonic",  # Llama 3.2 and 4, ToolACE, Gemma 3
        calls=(
            CallSyntax("", named=_PYTHON),
            CallSyntax("```tool_code", named=_PYTHON, end=("```",)),
        ),
        ignored=("<|python_start|>", "<|python_end|>"),
        template=_written("$name(**$args)", begin="[", separator=", ", end="]"),
    ),
    ToolFormat(
        "lfm2",
        calls=(
            CallSyntax(
                "<|tool_call_start|>", json=_JSON, named=_PYTHON, end=("<|tool_call_end|>",)
            ),
        ),
        template=_written(
            "$name(**$args)", begin="<|tool_call_start|>[", separator=", ", end="]<|tool_call_end|>"
        ),
    ),
    ToolFormat(
        "gemma4",
        calls=(
            CallSyntax("<|tool_call>", named=_GEMMA_CALL, end=("<tool_call|>",)),
            # After reasoning, models leave the tag out at times.
            CallSyntax("", named=_GEMMA_CALL, end=("<tool_call|>",)),
        ),
        ignored=("<|tool_response>",),  # which ends an answer with calls
        template=_written("<|tool_call>call:$name$args<tool_call|>"),
    ),
    ToolFormat(
        "glm4",  # GLM-4-0414: a line with the name, then the arguments
        calls=(CallSyntax("", named=NamedBody()),),
        template=_written("$name\n$args", separator="\n"),
    ),
    ToolFormat(
        "command",  # Command A and R7B
        calls=(
            CallSyntax(
                "<|START_ACTION|>",
                json=JsonBody(name_keys=("tool_name",), argument_keys=("parameters",)),
                end=("<|END_ACTION|>",),
            ),
        ),
        template=_written(
            '{"tool_call_id": "0", "tool_name": "$name", "parameters": $args}',
            begin="<|START_ACTION|>[\n    ",
            separator=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    ToolFormat(
        GENERIC,  # the last that is tried
        calls=(
            _BARE_CALL,
            _FENCED,
            _TOOL_CALL,
            CallSyntax("<tool_calls>", json=_JSON, end=("</tool_calls>",)),
            _PIPED_CALL,
            _FUNCTOOLS,
        ),
        separators=",;",
        template=_written(_OBJECT, separator="\n"),
    ),
)

HARMONY = ChannelFormat(
    "harmony",  # gpt-oss
    start="<|start|>",
    channel="<|channel|>",
    constrain="<|constrain|>",
    message="<|message|>",
    ends=CHANNEL_ENDS,
    reasoning_channel="analysis",
    template=_written(
        "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$args<|call|>",
        separator="<|start|>assistant",
    ),
)

TOOL_FORMATS: dict[str, ToolFormat | ChannelFormat] = {
    form.name: form for form in (*_TAGGED_FORMATS, HARMONY)
}
REASONING_FORMATS: dict[str, ReasoningFormat | ChannelFormat] = {
    **{name: ReasoningFormat(name, *marks) for name, marks in REASONING_MARKS.items()},
    HARMONY.name: HARMONY,
}
