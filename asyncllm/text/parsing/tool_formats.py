"""How the families we know write tool calls, as their chat templates show it."""

from __future__ import annotations

from msgspec.structs import replace

from asyncllm.text.parsing.formats import (
    CallSyntax,
    CallTemplate,
    JsonBody,
    NamedBody,
    ParameterStyle,
    ToolFormat,
)

_JSON = JsonBody()
_PYTHON = NamedBody(in_python=True)
_BARE = JsonBody(other_keys=("type", "id"), needs_arguments=True)
_FENCED = CallSyntax("```json", json=_BARE, end=("```",))
_QWEN_PARAMETERS = ParameterStyle("<parameter=", ">", "", "</parameter>", own_lines=True)
_QWEN_FUNCTION = NamedBody(head="<function=", name_end=">", parameters=_QWEN_PARAMETERS)
# Most families write the object; models trained on several write the other form as well.
_TOOL_CALL = CallSyntax(
    "<tool_call>",
    json=_JSON,
    named=replace(_QWEN_FUNCTION, end=("</function>",)),
    end=("</tool_call>",),
)
_GEMMA_CALL = NamedBody(head="call:", quote='<|"|>')
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISTRAL_CALLS = (
    CallSyntax("[TOOL_CALLS]", json=_JSON, named=NamedBody("[ARGS]", call_id="[CALL_ID]")),
)

#: The format for models of which nothing is known.
GENERIC = "json"

#: The generic one last.
TAGGED_FORMATS = (
    ToolFormat(
        "hermes",  # Qwen 2.5 and 3, Hermes 2 and 3, Granite 4
        calls=(_TOOL_CALL,),
        template=CallTemplate(
            '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        calls=(
            CallSyntax(
                "<tool_call>",
                json=_JSON,
                named=_QWEN_FUNCTION,
                end=("</function>", "</tool_call>"),
            ),
            # The models leave out the first tag at times.
            CallSyntax(
                "<function=",
                named=NamedBody(name_end=">", parameters=_QWEN_PARAMETERS),
                end=("</function>", "</tool_call>"),
            ),
        ),
        template=CallTemplate(
            "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", separator="\n"
        ),
    ),
    ToolFormat(
        "seed_oss",
        calls=(
            CallSyntax(
                "<seed:tool_call>",
                json=_JSON,
                named=NamedBody(
                    head="<function=",
                    name_end=">",
                    parameters=ParameterStyle(
                        "<parameter=", ">", "", "</parameter>", own_lines=False
                    ),
                ),
                end=("</function>", "</seed:tool_call>"),
            ),
        ),
        template=CallTemplate(
            "<seed:tool_call>\n<function=",
            ">\n",
            "\n</function>\n</seed:tool_call>",
            separator="\n",
        ),
    ),
    ToolFormat(
        "glm45",
        calls=(
            CallSyntax(
                "<tool_call>",
                json=_JSON,
                named=NamedBody(
                    name_end="",
                    parameters=ParameterStyle(
                        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", own_lines=False
                    ),
                ),
                end=("</tool_call>",),
            ),
        ),
        template=CallTemplate("<tool_call>", "\n", "\n</tool_call>", separator="\n"),
    ),
    ToolFormat(
        "minimax_m2",
        calls=(
            CallSyntax(
                "<invoke name=",
                named=NamedBody(
                    name_end=">",
                    parameters=ParameterStyle(
                        "<parameter name=", ">", "", "</parameter>", own_lines=False
                    ),
                ),
                end=("</invoke>",),
            ),
        ),
        ignored=("<minimax:tool_call>", "</minimax:tool_call>"),
        template=CallTemplate(
            '<invoke name="',
            '">\n',
            "\n</invoke>",
            begin="<minimax:tool_call>\n",
            separator="\n",
            end="\n</minimax:tool_call>",
        ),
    ),
    ToolFormat(
        "llama3_json",
        calls=(
            CallSyntax("", json=_BARE),
            CallSyntax("<|python_tag|>", json=_JSON, named=replace(_PYTHON, name_end=".call")),
            _FENCED,
            # What the model card of Llama 3.1 asks of custom tools.
            CallSyntax("<function=", named=NamedBody(name_end=">"), end=("</function>",)),
        ),
        separators=";",
        template=CallTemplate('{"name": "', '", "parameters": ', "}", separator="; "),
    ),
    ToolFormat(
        "mistral",
        calls=_MISTRAL_CALLS,
        call_ids="short",
        template=CallTemplate(
            '{"name": "', '", "arguments": ', "}", begin="[TOOL_CALLS][", separator=", ", end="]"
        ),
    ),
    # The same to read; since their tokenizer of version 11, models write a marker for every call.
    ToolFormat(
        "mistral_args",
        calls=_MISTRAL_CALLS,
        call_ids="short",
        template=CallTemplate("[TOOL_CALLS]", "[ARGS]", ""),
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
        template=CallTemplate(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
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
        template=CallTemplate(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
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
        template=CallTemplate(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(
        "granite",  # 3.x, which writes either marker, or none
        calls=(
            CallSyntax("<|tool_call|>", json=_JSON, end=("<|/tool_call|>",)),
            _TOOL_CALL,
            CallSyntax("", json=_BARE),
            _FENCED,
        ),
        template=CallTemplate(
            '{"name": "', '", "arguments": ', "}", begin="<|tool_call|>[", separator=", ", end="]"
        ),
    ),
    ToolFormat(
        "phi4_mini",
        calls=(
            CallSyntax("<|tool_call|>", json=_JSON, end=("<|/tool_call|>",)),
            CallSyntax("functools", json=_JSON),  # what Microsoft's prompts ask for
            CallSyntax("", json=_BARE),
            _FENCED,
        ),
        template=CallTemplate(
            '{"name": "',
            '", "arguments": ',
            "}",
            begin="<|tool_call|>[",
            separator=", ",
            end="]<|/tool_call|>",
        ),
    ),
    ToolFormat(
        "nemotron",  # Nano 2, Super 1.5
        calls=(CallSyntax("<TOOLCALL>", json=_JSON, end=("</TOOLCALL>",)),),
        template=CallTemplate(
            '{"name": "',
            '", "arguments": ',
            "}",
            begin="<TOOLCALL>[",
            separator=", ",
            end="]</TOOLCALL>",
        ),
    ),
    ToolFormat(
        "olmo3",
        calls=(
            CallSyntax("<function_calls>", json=_JSON, named=_PYTHON, end=("</function_calls>",)),
        ),
        template=CallTemplate(
            "", "(**", ")", begin="<function_calls>", separator="\n", end="</function_calls>"
        ),
    ),
    ToolFormat(
        "pythonic",  # Llama 3.2 and 4, ToolACE, Gemma 3
        calls=(
            CallSyntax("", named=_PYTHON),
            CallSyntax("```tool_code", named=_PYTHON, end=("```",)),
        ),
        ignored=("<|python_start|>", "<|python_end|>"),
        template=CallTemplate("", "(**", ")", begin="[", separator=", ", end="]"),
    ),
    ToolFormat(
        "lfm2",
        calls=(
            CallSyntax(
                "<|tool_call_start|>", json=_JSON, named=_PYTHON, end=("<|tool_call_end|>",)
            ),
        ),
        template=CallTemplate(
            "", "(**", ")", begin="<|tool_call_start|>[", separator=", ", end="]<|tool_call_end|>"
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
        template=CallTemplate("<|tool_call>call:", "", "<tool_call|>"),
    ),
    ToolFormat(
        "glm4",  # GLM-4-0414: a line with the name, then the arguments
        calls=(CallSyntax("", named=NamedBody()),),
        template=CallTemplate("", "\n", "", separator="\n"),
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
        template=CallTemplate(
            '{"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            "}",
            begin="<|START_ACTION|>[\n    ",
            separator=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    ToolFormat(
        GENERIC,
        calls=(
            CallSyntax("", json=_BARE),
            _FENCED,
            _TOOL_CALL,
            CallSyntax("<tool_calls>", json=_JSON, end=("</tool_calls>",)),
            CallSyntax("<|tool_call|>", json=_JSON, end=("<|/tool_call|>",)),
            CallSyntax("functools", json=_JSON),
        ),
        separators=",;",
        template=CallTemplate('{"name": "', '", "arguments": ', "}", separator="\n"),
    ),
)
