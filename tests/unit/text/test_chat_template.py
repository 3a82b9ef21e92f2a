from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text import ChatTemplate
from tests.support.text.tokenizers import byte_level, write_folder

if TYPE_CHECKING:
    from pathlib import Path

# Shortened from the models' own, with what makes each of them special.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = '<<SYS>>' + messages[0]['content'] | trim + '<</SYS>>' %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system = '' %}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% set content = system + message['content'] if loop.index0 == 0 else message['content'] %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {% else %}
        {{ ' ' + content | trim + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {% generation %}{{- content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function %}
        {{- '\\n<tool_call>{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}</tool_call>' }}
        {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GEMMA = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for item in message['content'] %}{{- item['text'] }}{%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot_id|>' }}
    {%- if 'tool_calls' in message %}{{- message.tool_calls | tojson(indent=2) }}{%- endif %}
{%- endfor %}"""

# DeepSeek R1: arguments as JSON text, and calls only where the content is None.
DEEPSEEK = """\
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {{- '<Assistant>' + message['content'] }}
    {%- endif %}
{%- endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "qwen": QWEN, "gemma": GEMMA, "llama3": LLAMA3}

USER = {"role": "user", "content": " What's <b>new</b>? 你好 🙂 \n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Not much, "}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wie ist das Wetter in 'Zürich'?",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": [1, 2]}'},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
NAMES = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "__type": "AddedToken"},
    "pad_token": None,
}


def template_in(folder: Path, source: Any) -> ChatTemplate:
    config = {**NAMES, "chat_template": source}
    template = ChatTemplate.from_folder(write_folder(folder, byte_level(), config))
    assert template is not None
    return template


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What transformers asks of its callers."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer


class TestEqualsTransformers:
    @pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
    @pytest.mark.parametrize(
        ("messages", "options"),
        [
            ([USER], {}),
            ([USER], {"add_generation_prompt": False}),
            ([SYSTEM, USER, ASSISTANT, USER], {}),
            ([USER, {**ASSISTANT, "reasoning": "Hm."}], {}),
            ([USER], {"enable_thinking": False, "date_string": "1 May"}),
            ([USER], {"tools": [TOOL]}),
            ([USER, {**CALLING, "content": ""}], {"tools": [TOOL]}),
            ([USER, ASSISTANT], {"continue_final_message": True, "add_generation_prompt": False}),
        ],
    )
    def test_render(
        self,
        source: str,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        tmp_path: Path,
        auto_tokenizer: Any,
    ) -> None:
        before = copy.deepcopy(messages)
        # Three of these print no calls; then ours writes them (test_form.py).
        ours = template_in(tmp_path, source).render(messages, as_text=False, **options)
        theirs = auto_tokenizer.from_pretrained(tmp_path).apply_chat_template(
            with_parsed_arguments(messages),
            tokenize=False,
            **{"add_generation_prompt": True, **options},
        )
        assert ours == theirs
        assert messages == before

    @pytest.mark.parametrize("tools", [None, [TOOL]])
    def test_named_templates(self, tools: Any, tmp_path: Path, auto_tokenizer: Any) -> None:
        named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN}]
        ours = template_in(tmp_path, named).render([USER], tools=tools)
        theirs = auto_tokenizer.from_pretrained(tmp_path).apply_chat_template(
            [USER], tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert ours == theirs

    def test_template_files(self, tmp_path: Path, auto_tokenizer: Any) -> None:
        write_folder(tmp_path, byte_level(), {**NAMES, "chat_template": "not this one"})
        (tmp_path / "chat_template.jinja").write_text(LLAMA3, "utf-8")
        more = tmp_path / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(QWEN, "utf-8")
        ours = ChatTemplate.from_folder(tmp_path)
        theirs = auto_tokenizer.from_pretrained(tmp_path)
        assert ours is not None
        for tools in (None, [TOOL]):
            assert ours.render([USER], tools=tools) == theirs.apply_chat_template(
                [USER], tools=tools, add_generation_prompt=True, tokenize=False
            )


class TestMessageForm:
    def test_text_parts_are_joined_with_newlines(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        joined = ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
        assert joined == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
        assert "one\ntwo" in ChatTemplate(QWEN).render([{"role": "user", "content": parts}])

    def test_text_parts_are_left_to_a_template_that_prints_them(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        template = ChatTemplate(GEMMA, {"bos_token": "<s>"})
        assert "onetwo<end_of_turn>" in template.render([{"role": "user", "content": parts}])
        continued = template.render(
            [{"role": "assistant", "content": parts}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert continued == "<s><start_of_turn>assistant\nonetwo"

    def test_developer_becomes_system_unless_the_template_knows_it(self) -> None:
        message = {"role": "developer", "content": "Hi"}
        assert "<|im_start|>system\nHi" in ChatTemplate(CHATML).render([message])
        knows = CHATML + "{# developer #}"
        assert "<|im_start|>developer\nHi" in ChatTemplate(knows).render([message])

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
    def test_reasoning_under_any_name(self, name: str) -> None:
        rendered = ChatTemplate(QWEN).render([USER, {**ASSISTANT, name: "Hm."}])
        assert "<think>Hm.</think>" in rendered

    def test_arguments_become_objects(self) -> None:
        rendered = ChatTemplate(QWEN).render([USER, CALLING])
        assert '"arguments": {"city": "Zürich", "days": [1, 2]}' in rendered
        empty = {**CALL, "function": {"name": "now", "arguments": ""}}
        rendered = ChatTemplate(QWEN).render([USER, {**CALLING, "tool_calls": [empty]}])
        assert '"arguments": {}' in rendered

    def test_arguments_stay_text_where_the_template_wants_text(self) -> None:
        rendered = ChatTemplate(DEEPSEEK).render([USER, CALLING])
        assert rendered.endswith('<call>weather\n{"city": "Zürich", "days": [1, 2]}')


class TestRefusals:
    @pytest.mark.parametrize(
        "messages",
        [
            [],
            ["hi"],
            [{"content": "no role"}],
            [{"role": 1, "content": "hi"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": ["hi"]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{**CALLING, "tool_calls": [{"function": {"arguments": "{}"}}]}],
            [{**CALLING, "tool_calls": {"function": {"name": "f", "arguments": "{}"}}}],
            [{"role": "user"}],
        ],
    )
    def test_malformed_messages(self, messages: Any) -> None:
        with pytest.raises(BadRequest) as caught:
            ChatTemplate(LLAMA3 + CHATML).render(messages)
        assert caught.value.param == "messages"

    def test_message_of_the_template(self) -> None:
        template = ChatTemplate("{{ raise_exception('no ' + messages[0].role) }}")
        with pytest.raises(BadRequest, match="no user") as caught:
            template.render([USER, USER])
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].missing.deeper }}",
            "{{ 1 / 0 }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ raise_exception('no') }}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "{% set ns = namespace(__class__=1) %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ messages | map('no_such_filter') | list }}",
        ],
    )
    def test_failing_templates(self, source: str) -> None:
        with pytest.raises(BadRequest, match="chat template: ") as caught:
            ChatTemplate(source).render([USER])
        assert caught.value.param == "messages"

    def test_continuing_what_cannot_be_continued(self) -> None:
        def continued(source: str, message: dict[str, Any]) -> str:
            return ChatTemplate(source).render(
                [message], continue_final_message=True, add_generation_prompt=False
            )

        for source, message in (
            (CHATML, {"role": "assistant"}),
            (GEMMA, {"role": "assistant", "content": []}),
            ("{{ messages[0].role }}", ASSISTANT),
            ("{{ messages[0].content | upper }}", ASSISTANT),
        ):
            with pytest.raises(BadRequest) as caught:
                continued(source, message)
            assert caught.value.param == "messages"
        with pytest.raises(BadRequest) as caught:
            ChatTemplate(CHATML).render([ASSISTANT], continue_final_message=True)
        assert caught.value.param == "continue_final_message"

    def test_no_default_template(self) -> None:
        template = ChatTemplate({"tool_use": QWEN})
        assert "weather" in template.render([USER], tools=[TOOL])
        with pytest.raises(BadRequest, match="tool_use"):
            template.render([USER])

    def test_variables_cannot_replace_the_messages(self) -> None:
        variables: dict[str, Any] = {"messages": [ASSISTANT], "self": 1}
        rendered = ChatTemplate(CHATML).render([USER], **variables)
        assert "Not much" not in rendered


class TestFromFolder:
    def test_none(self, tmp_path: Path) -> None:
        assert ChatTemplate.from_folder(tmp_path) is None
        assert ChatTemplate.from_folder(write_folder(tmp_path, byte_level())) is None

    @pytest.mark.parametrize("source", ["{% if %}", ["x"], [{"name": "default"}], 7])
    def test_malformed(self, source: Any, tmp_path: Path) -> None:
        with pytest.raises(ModelError):
            template_in(tmp_path, source)
