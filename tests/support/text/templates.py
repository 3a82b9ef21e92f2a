"""Chat templates of a few lines that write calls as those of public models do."""

from __future__ import annotations

_HEAD = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- if m.tool_calls %}"
)
_TAIL = (
    "{%- endif %}<|im_end|>\n{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
_EACH = "{%- for c in m.tool_calls %}{% set f = c.function %}"
_NEXT = "{% if not loop.last %}, {% endif %}"
_END = "{% endfor %}"
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}" + _NEXT + _END
) + ")"


def chat_template(calls: str) -> str:
    """A template whose answers with calls are these."""
    return _HEAD + calls + _TAIL


def _each(call: str, between: str = "") -> str:
    last = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return _EACH + call + last + _END


def _json(name: str = "name", arguments: str = "arguments") -> str:
    return '{"' + name + '": "{{ f.name }}", "' + arguments + '": {{ f.arguments | tojson }}}'


def _parameters(before: str, between: str, after: str) -> str:
    each = "{% for k, v in f.arguments.items() %}"
    value = "{{ v if v is string else v | tojson }}"
    return each + before + "{{ k }}" + between + value + after + _END


#: The format that is chosen -> what such templates write.
CALLS = {
    "hermes": _each("<tool_call>\n" + _json() + "\n</tool_call>", "\n"),
    "qwen3_coder": _each(
        "<tool_call>\n<function={{ f.name }}>\n"
        + _parameters("<parameter=", ">\n", "\n</parameter>\n")
        + "</function>\n</tool_call>",
        "\n",
    ),
    "seed_oss": _each(
        "<seed:tool_call>\n<function={{ f.name }}>\n"
        + _parameters("<parameter=", ">", "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "\n",
    ),
    "glm45": _each(
        "<tool_call>{{ f.name }}\n"
        + _parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
        "\n",
    ),
    "minimax_m2": "<minimax:tool_call>\n"
    + _each(
        '<invoke name="{{ f.name }}">\n'
        + _parameters('<parameter name="', '">', "</parameter>\n")
        + "</invoke>\n"
    )
    + "</minimax:tool_call>",
    "llama3_json": _each(_json(arguments="parameters"), "; "),
    "mistral": "[TOOL_CALLS][" + _each(_json(), ", ") + "]",
    "mistral_args": _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + _each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
        "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
        "\n",
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + _each(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + _each(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>"
    )
    + "<|tool_calls_section_end|>",
    "granite": "<|tool_call|>[" + _each(_json(), ", ") + "]",
    "nemotron": "<TOOLCALL>[" + _each(_json(), ", ") + "]</TOOLCALL>",
    "olmo3": "<function_calls>" + _each(_PYTHON, "\n") + "</function_calls>",
    "pythonic": "[" + _each(_PYTHON, ", ") + "]",
    "lfm2": "<|tool_call_start|>[" + _each(_PYTHON, ", ") + "]<|tool_call_end|>",
    "gemma4": _each(
        "<|tool_call>call:{{ f.name ~ '{' }}"
        + "{% for k, v in f.arguments.items() %}{{ k }}:"
        + '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        + "{% if not loop.last %},{% endif %}"
        + _END
        + "}<tool_call|>"
    ),
    "glm4": _each("{{ f.name }}\n{{ f.arguments | tojson }}", "\n"),
    "command": "<|START_ACTION|>[\n    "
    + _each(
        '{"tool_call_id": "{{ loop.index0 }}", ' + _json("tool_name", "parameters")[1:], ",\n    "
    )
    + "\n]<|END_ACTION|>",
    "json": _each(_json(), "\n"),
}

#: What a template writes, and what its model writes for f({"a": 1}) and then for f({}): in forms
#: that no model is listed with.
OTHER_CALLS = {
    "list": (
        "<tool_list>[" + _each(_json(), ", ") + "]</tool_list>",
        '<tool_list>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]</tool_list>',
    ),
    "tag in prose": (
        "I use <tool_call> or rather <calls>[" + _each(_json("tool", "args"), ", ") + "]</calls>",
        '<calls>[{"tool": "f", "args": {"a": 1}}, {"tool": "f", "args": {}}]</calls>',
    ),
    "name as key": (
        "<|tools|>[" + _each('{"{{ f.name }}": {{ f.arguments | tojson }}}', ", ") + "]<|end|>",
        '<|tools|>[{"f": {"a": 1}}, {"f": {}}]<|end|>',
    ),
    "words": (
        _each("Action: {{ f.name }}\nInput: {{ f.arguments | tojson }}\n"),
        'Action: f\nInput: {"a": 1}\nAction: f\nInput: {}\n',
    ),
    "signs": (
        _each("]<]x[>[<tool_call>{{ f.name }} {{ f.arguments | tojson }}</tool_call>"),
        ']<]x[>[<tool_call>f {"a": 1}</tool_call>]<]x[>[<tool_call>f {}</tool_call>',
    ),
    "prompt ends with it": (
        _each(">>>{{ f.name }}\n{{ f.arguments | tojson }}"),
        '>>>f\n{"a": 1}>>>f\n{}',
    ),
    "tags": (
        _each(
            '<function name="{{ f.name }}">'
            + _parameters('<param name="', '">', "</param>")
            + "</function>"
        ),
        '<function name="f"><param name="a">1</param></function><function name="f"></function>',
    ),
    "tags that are names": (
        "]<]x[>[<tool_call>\n"
        + _each(
            ']<]x[>[<invoke name="{{ f.name }}">\n'
            + _parameters("]<]x[>[<", ">", "]<]x[>[</{{ k }}>\n")
            + "]<]x[>[</invoke>\n"
        )
        + "]<]x[>[</tool_call>",
        ']<]x[>[<tool_call>\n]<]x[>[<invoke name="f">\n]<]x[>[<a>1]<]x[>[</a>\n]<]x[>[</invoke>\n'
        ']<]x[>[<invoke name="f">\n]<]x[>[</invoke>\n]<]x[>[</tool_call>',
    ),
    "elements": (
        _each(
            "<tool><name>{{ f.name }}</name>\n<with>\n"
            + _parameters("<", ">", "</{{ k }}>\n")
            + "</with></tool>"
        ),
        "<tool><name>f</name>\n<with>\n<a>1</a>\n</with></tool>"
        "<tool><name>f</name>\n<with>\n</with></tool>",
    ),
    "tags with kinds": (
        "<|x|calls>\n"
        + _each(
            '<|x|invoke name="{{ f.name }}">\n'
            "{% for k, v in f.arguments.items() %}"
            "<|x|parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            "{{ v if v is string else v | tojson }}</|x|parameter>\n" + _END + "</|x|invoke>\n"
        )
        + "</|x|calls>",
        '<|x|calls>\n<|x|invoke name="f">\n<|x|parameter name="a" string="false">1</|x|parameter>\n'
        '</|x|invoke>\n<|x|invoke name="f">\n</|x|invoke>\n</|x|calls>',
    ),
    "quotes": (
        _each(
            "<start>call:{{ f.name ~ '{' }}"
            + "{% for k, v in f.arguments.items() %}{{ k }}:"
            + "{% if v is string %}<esc>{{ v }}<esc>{% else %}{{ v | tojson }}{% endif %}"
            + "{% if not loop.last %},{% endif %}"
            + _END
            + "}<stop>"
        ),
        "<start>call:f{a:1}<stop><start>call:f{}<stop>",
    ),
    "Python in tags": ("<py>\n" + _each(_PYTHON, "\n") + "\n</py>", "<py>\nf(a=1)\nf()\n</py>"),
    "id after the name": (
        _each("<do>{{ f.name }}<id>{{ c.id }}<with>{{ f.arguments | tojson }}</do>"),
        '<do>f<id>call_7<with>{"a": 1}</do><do>f<with>{}</do>',
    ),
    "id before the name": (
        "<|calls|>"
        + _each("<|call:id|>{{ c.id }}<|name|>{{ f.name }}<|with|>{{ f.arguments | tojson }}<|/|>")
        + "<|done|>",
        '<|calls|><|call:id|>a7Bx<|name|>f<|with|>{"a": 1}<|/|>'
        "<|call:id|>9<|name|>f<|with|>{}<|/|><|done|>",
    ),
    "a number after the name": (
        "<|open|>tools<|sep|>"
        + _each(
            '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
            "{% for k, v in f.arguments.items() %}"
            "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\""
            "<|sep|>{{ v }}<|close|>argument<|sep|>" + _END + "<|close|>call<|sep|>"
        )
        + "<|close|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a"'
        ' type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    ),
    "a number before the name": (
        _each(
            '<call number="{{ loop.index0 }}" of="{{ f.name }}">{{ f.arguments | tojson }}</call>',
            "\n",
        ),
        '<call number="0" of="f">{"a": 1}</call>\n<call number="1" of="f">{}</call>',
    ),
    "a number in the id": (
        _each("<do>{{ c.id }}<with>{{ f.arguments | tojson }}</do>"),
        '<do>functions.f:0<with>{"a": 1}</do><do>functions.f:1<with>{}</do>',
    ),
    "as in the API": (
        _each('<|x|>{"type": "function", "function": ' + _json() + "}\n"),
        '<|x|>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}\n'
        '<|x|>{"type": "function", "function": {"name": "f", "arguments": {}}}\n',
    ),
    "name and colon": (
        _each("<act>{{ f.name }}: {{ f.arguments | tojson }}</act>", "\n"),
        '<act>f: {"a": 1}</act>\n<act>f: {}</act>',
    ),
    "calls within calls": (
        "<calls>\n" + _each("<call>" + _json() + "</call>\n") + "</calls>",
        '<calls>\n<call>{"name": "f", "arguments": {"a": 1}}</call>\n'
        '<call>{"name": "f", "arguments": {}}</call>\n</calls>',
    ),
    "one marker for all": (
        "<calls>" + _each("call:{{ f.name }}{{ f.arguments | tojson }}", "; ") + "</calls>",
        '<calls>call:f{"a": 1}; call:f{}</calls>',
    ),
    "string": (
        _each('<x>{"n": "{{ f.name }}", "a": {{ f.arguments | tojson | tojson }}}</x>'),
        '<x>{"n": "f", "a": "{\\"a\\": 1}"}</x><x>{"n": "f", "a": "{}"}</x>',
    ),
}
