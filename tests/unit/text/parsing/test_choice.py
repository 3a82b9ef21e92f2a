"""Which formats a model gets, which tokens they need, and what tool_choice enforces."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.parsing import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    CallStructure,
    Formats,
    call_structure,
    choose_formats,
    finish_reason,
    message_of,
    visible_special_tokens,
)
from asyncllm.text.parsing.formats import ReasoningFormat
from asyncllm.types import FinishReason
from tests.support.text.parsing_texts import TOOL_NAMES, TOOLS, events_of, formats_of, tool
from tests.support.text.templates import CALLS, OTHER_CALLS, chat_template
from tests.unit.text.parsing.test_cuts import assert_cuts_do_not_matter

NAMED = {"type": "function", "function": {"name": "now"}}


def names(formats: Formats) -> tuple[str | None, str | None]:
    tools, reasoning = formats.tools, formats.reasoning
    return tools.name if tools else None, reasoning.name if reasoning else None


# Templates that write nothing, and so are judged by their texts or by the model.
@pytest.mark.parametrize(
    ("model", "template", "expected"),
    [
        ("qwen2", "<tool_call></tool_call>", ("hermes", None)),
        ("qwen3", "<think></think> <tool_call></tool_call>", ("hermes", "think")),
        ("qwen3_moe", "<tool_call><function=x><parameter=y></parameter>", ("qwen3_coder", "think")),
        ("qwen3_next", "<think></think><tool_call>", ("hermes", "think")),
        ("glm4_moe", "<think></think><tool_call><arg_key><arg_value>", ("glm45", "think")),
        (
            "minimax_m2",
            '<think></think><response><minimax:tool_call><invoke name="',
            ("minimax_m2", "think"),
        ),
        ("llama", "<|start_header_id|>Environment: ipython <|python_tag|>", ("llama3_json", None)),
        ("llama", '<|start_header_id|>{"name": "x", "parameters": {}}', ("llama3_json", None)),
        ("llama", "[INST] {{ messages }} [/INST]", ("json", None)),
        ("mistral", "[AVAILABLE_TOOLS][TOOL_CALLS][", ("mistral", None)),
        ("mistral3", "[TOOL_CALLS]name[CALL_ID]id[ARGS]{}", ("mistral_args", None)),
        ("mistral3", "[THINK][/THINK][TOOL_CALLS]name[ARGS]{}", ("mistral_args", "mistral")),
        ("deepseek_v3", "</think><｜tool▁call▁begin｜>```json", ("deepseek_v3", "think")),
        ("deepseek_v3", "</think><｜tool▁call▁begin｜>{}", ("deepseek_v31", "think")),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_argument_begin|>", ("kimi_k2", None)),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", ("harmony", "harmony")),
        ("granite", "Here is my thought process: <|tool_call|>", ("granite", "granite")),
        ("granite", "<think></think><response></response>", ("granite", "granite_tags")),
        ("phi3", "<|tool|>{{ tools }}<|/tool|>", ("phi4_mini", None)),
        ("lfm2", "<|tool_list_start|>{{ tools }}<|tool_list_end|>", ("lfm2", None)),
        ("gemma4_text", None, ("gemma4", "gemma4")),
        ("seed_oss", "<seed:think><seed:tool_call><function=<parameter=", ("seed_oss",) * 2),
        ("cohere2", "<|START_THINKING|><|START_ACTION|>", ("command", "command")),
        ("nemotron_h", "<think></think><TOOLCALL>[", ("nemotron", "think")),
        ("olmo3", "<functions></functions><function_calls></function_calls>", ("olmo3", None)),
        # no template, or one that says nothing
        ("qwen3", None, ("hermes", "think")),
        ("gpt_oss", "", ("harmony", "harmony")),
        ("glm4_moe", None, ("glm45", "think")),
        ("seed_oss", None, ("seed_oss", "seed_oss")),
        ("ministral3", None, ("mistral_args", None)),
        ("qwen3_vl", None, ("hermes", None)),
        ("gpt2", None, ("json", None)),
        (None, None, ("json", None)),
    ],
)
def test_formats_by_text_or_model(
    model: str | None, template: str | None, expected: tuple[str | None, str | None]
) -> None:
    assert names(choose_formats(template, model)) == expected


@pytest.mark.parametrize("name", CALLS)
def test_formats_by_what_a_template_writes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    # What else it says does not count.
    template = "{# <tool_call> [TOOL_CALLS] <|python_tag|> #}" + chat_template(CALLS[name])
    formats = choose_formats(template)
    assert names(formats) == (name, None)
    assert formats.tools == TOOL_FORMATS[name]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert name in caplog.text


def read_calls(text: str, formats: Formats, **options: Any) -> list[tuple[str, Any]]:
    message = message_of(
        events_of([text], formats, tools=[tool("f", a={"type": "integer"})], **options)
    )
    assert (message.content.strip(), message.reasoning) == ("", "")
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_formats_are_derived_from_what_a_template_writes(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    calls, text = OTHER_CALLS[kind]
    formats = choose_formats(chat_template(calls))
    assert names(formats) == ("template", None)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert read_calls(text, formats) == [("f", {"a": 1}), ("f", {})]
    assert_cuts_do_not_matter(f"Hm. {text} {text[:-9]}", formats, tools=[tool("f")])
    # A grammar forces the same.
    forced = call_structure(formats, [tool("f")], "required")
    assert forced is not None
    [tag] = forced.tags
    made = forced.separator.join(tag.begin + text + tag.end for text in ('{"a": 1}', "{}"))
    assert read_calls(forced.begin + made + forced.end, formats) == [("f", {"a": 1}), ("f", {})]


def test_a_listed_format_writes_as_the_template_does() -> None:
    template = CALLS["hermes"].replace('"arguments"', '"parameters"').replace("\n<", "<")
    formats = choose_formats(chat_template(template))
    assert names(formats) == ("hermes", None)
    structure = structure_of(NAMED, formats)
    assert structure.tags[0].begin == '<tool_call>\n{"name": "now", "parameters": '
    assert structure.tags[0].end == "}</tool_call>"


def test_a_word_in_place_of_a_name_says_that_content_follows() -> None:
    calls = chat_template(OTHER_CALLS["prompt ends with it"][0])
    template = calls.replace("{{ m.content or '' }}", "{{ '>>>all\n' ~ m.content if m.content }}")
    template = template.replace("assistant\n{% endif %}", "assistant\n>>>{% endif %}")
    formats = choose_formats(template)
    prompt = "<|im_start|>assistant\n>>>"
    for text, content in (
        ("all\nHi >>> x", "Hi >>> x"),
        ('f\n{"a": 1}', ""),
        ('all\nHi.>>>f\n{"a": 1}', "Hi."),
        ('>>>f\n{"a": 1}', ""),  # models repeat the prompt's
    ):
        message = message_of(events_of(text, formats, tools=[tool("f")], prompt=prompt))
        assert message.content == content
        assert [call.arguments for call in message.calls] == ['{"a": 1}'] * ("f" in text)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            "{{ m.tool_calls[0].function.name }} {% for k, v in "
            "m.tool_calls[0].function.arguments.items() %}{{ k }} is {{ v }} {% endfor %}",
            "form that is not known",
        ),
        ("{% for c in m.tool_calls %}{{ c.id }}{{ CALL }}{% endfor %}", "form that is not known"),
        ("calls", "writes no calls"),
        ("{{ raise_exception('no') }}", "writes no calls"),
    ],
)
def test_what_is_not_recognized_is_said(
    calls: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = calls.replace(
        "{{ CALL }}", ":{{ c.function.name }} {{ c.function.arguments | tojson }}"
    )
    assert names(choose_formats(chat_template(calls))) == ("json", None)
    [record] = caplog.records
    assert (record.levelname, words in record.message) == ("WARNING", True)
    assert "--tool-parser" in record.message
    caplog.clear()
    choose_formats(chat_template(calls), tools="hermes")
    choose_formats(chat_template("").replace("tools", "other"))
    choose_formats("{{ broken")
    assert not caplog.records


@pytest.mark.parametrize("prompt", ["", "open", "closed"])
@pytest.mark.parametrize(
    ("before", "between", "expected"),
    [
        ("<think>\n", "\n</think>\n\n", ("<think>", "</think>")),
        ("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
        ("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
        ("<|channel>thought\n", "\n<channel|>", ("<|channel>thought", "<channel|>")),
        ("<|hm>thought\n", "\n<hm|>", ("<|hm>thought", "<hm|>")),
        ("<|o|>think<|sep|>", "<|c|>think<|sep|>", ("<|o|>think<|sep|>", "<|c|>think<|sep|>")),
    ],
)
def test_reasoning_by_what_a_template_writes(
    before: str, between: str, expected: tuple[str, str], prompt: str
) -> None:
    write = "{% if m.reasoning_content %}" + before + "{{ m.reasoning_content }}" + between
    if prompt == "closed":  # reasoning that is left out is written, too
        write += "{% elif m.role == 'assistant' %}" + before + between
    template = "{# <think> </think> #}" + chat_template(CALLS["hermes"]).replace(
        "{{ m.content", write + "{% endif %}{{ m.content"
    )
    if prompt:
        opened = before if prompt == "open" else before + between
        template = template.removesuffix("{% endif %}") + opened + "{% endif %}"
    formats = choose_formats(template)
    assert formats.tools == TOOL_FORMATS["hermes"]
    assert isinstance(formats.reasoning, ReasoningFormat)
    assert (formats.reasoning.begins, formats.reasoning.ends) == ((expected[0],), (expected[1],))
    message = message_of(events_of(before + "Hm." + between + "So.", formats))
    assert (message.reasoning.strip(), message.content) == ("Hm.", "So.")


def test_reasoning_that_words_begin() -> None:
    write = "{% if m.reasoning_content %}{{ m.reasoning_content }}\n[BEGIN ANSWER]\n{% endif %}"
    template = chat_template(CALLS["hermes"]).replace("{{ m.content", write + "{{ m.content")
    template = template.replace("<|im_start|>assistant\n", "<|assistant|>\nMy steps:\n")
    formats = choose_formats(template.replace("<|im_start|>{{ m.role }}", "<|{{ m.role }}|>"))
    message = message_of(
        events_of("Hm.\n[BEGIN ANSWER]\nSo.", formats, prompt="<|assistant|>\nMy steps:\n")
    )
    assert (message.reasoning.strip(), message.content) == ("Hm.", "So.")


def test_markers_around_an_answer_are_seen_as_well() -> None:
    write = "{% if m.reasoning_content %}<a>{{ m.reasoning_content }}</a><b>{% endif %}"
    template = chat_template(CALLS["hermes"]).replace(
        "{{ m.content or '' }}", write + "{{ m.content }}</b>"
    )
    message = message_of(events_of("<a>Hm.</a><b>So.</b>", choose_formats(template)))
    assert (message.reasoning, message.content) == ("Hm.", "So.")


def test_markers_that_one_tag_ends() -> None:
    """Also around reasoning and the answer, within which calls begin with the same tags."""
    template = (
        "{% for m in messages %}<|o|>message role={{ m.role }}<|s|>{% if m.role == 'assistant' %}"
        "<|o|>think<|s|>{{ m.reasoning_content }}<|c|>think<|s|><|o|>response<|s|>{{ m.content }}"
        "<|c|>response<|s|>{% if m.tool_calls %}<|o|>tools<|s|>{% for c in m.tool_calls %}"
        '<|o|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|s|>'
        '{% for k, v in c.function.arguments.items() %}<|o|>argument key="{{ k }}"<|s|>{{ v }}'
        "<|c|>argument<|s|>{% endfor %}<|c|>call<|s|>{% endfor %}<|c|>tools<|s|>{% endif %}"
        "{% else %}{{ m.content }}{% endif %}<|c|>message<|s|><|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|o|>message role=assistant<|s|><|o|>think<|s|>{% endif %}"
    )
    formats = choose_formats(template)
    prompt = "<|o|>message role=assistant<|s|><|o|>think<|s|>"
    call = '<|o|>call tool="f" index="{}"<|s|><|o|>argument key="a"<|s|>{}<|c|>argument<|s|>'
    call += "<|c|>call<|s|>"
    calls = f"<|o|>tools<|s|>{call.format(1, 7)}{call.format(2, 8)}<|c|>tools<|s|>"
    for said, content, made in (("So.", "So.", ""), ("", "", calls), ("So.", "So.", calls)):
        text = f"Hm.<|c|>think<|s|><|o|>response<|s|>{said}<|c|>response<|s|>{made}"
        for end in ("", "<|c|>message<|s|>"):
            options: Any = {"tools": [tool("f", a={"type": "integer"})], "prompt": prompt}
            message = message_of(events_of(text + end, formats, **options))
            assert (message.reasoning, message.content) == ("Hm.", content)
            expected = ['{"a": 7}', '{"a": 8}'] if made else []
            assert [found.arguments for found in message.calls] == expected
    assert_cuts_do_not_matter(text, formats, **options)


def test_calls_that_are_messages_of_their_own() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "assistant<|role|>\n<|sep|>\n\nfunction call<|role|>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "<|sep|>\n\n{% endfor %}{% else %}{{ m.role }}<|role|>\n{{ m.content }}<|sep|>\n\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant<|role|>\n{% endif %}"
    )
    formats = choose_formats(template)
    assert names(formats) == ("template", None)
    text = '<|sep|>\n\nfunction call<|role|>\n{"name": "f", "arguments": {"a": 1}}'
    assert read_calls(text, formats) == [("f", {"a": 1})]


def test_parts_of_an_answer_that_have_a_header_each() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
        "<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{% endif %}{% if m.content %}"
        "<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}{% if m.tool_calls %}"
        "<|begin|>assistant<|calls|>{% for c in m.tool_calls %}<|call:begin|>{{ c.id }}<|name|>"
        "{{ c.function.name }}<|args|>{{ c.function.arguments | tojson }}<|call:end|>{% endfor %}"
        "<|done|>{% endif %}{% else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
    )
    formats = choose_formats(template)
    thought, header = "<|think|>Hm.<|end|>", "<|begin|>assistant"
    calls = '<|calls|><|call:begin|>x7<|name|>f<|args|>{"a": 7}<|call:end|><|done|>'
    for text, reasoning, content, arguments in (
        (thought + header + "<|content|>So.<|end|>", "Hm.", "So.", []),
        ("<|content|>So.<|end|>", "", "So.", []),
        (thought + header + calls, "Hm.", "", ['{"a": 7}']),
        (calls, "", "", ['{"a": 7}']),
    ):
        message = message_of(events_of(text, formats, tools=[tool("f")], prompt=header))
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [call.arguments for call in message.calls] == arguments
        assert_cuts_do_not_matter(text, formats, tools=[tool("f")], prompt=header)


def test_formats_by_name() -> None:
    template = "<think></think><tool_call>"
    assert names(choose_formats(template, tools="mistral")) == ("mistral", "think")
    assert names(choose_formats(template, tools="none", reasoning="none")) == (None, None)
    assert names(choose_formats(template, reasoning="granite")) == ("hermes", "granite")
    # Channels hold both; what was not asked for gives way.
    assert names(choose_formats(template, tools="harmony")) == ("harmony", "harmony")
    assert names(choose_formats(template, reasoning="harmony")) == ("harmony", "harmony")
    assert names(choose_formats(None, "gpt_oss", tools="hermes")) == ("hermes", None)
    assert names(choose_formats(None, "gpt_oss", reasoning="none")) == ("json", None)


@pytest.mark.parametrize(
    ("tools", "reasoning", "words"),
    [
        ("nonsense", "auto", "nonsense.*hermes"),
        ("auto", "hermes", "hermes.*think"),
        ("harmony", "think", "combined"),
        ("hermes", "harmony", "combined"),
    ],
)
def test_names_that_are_refused(tools: str, reasoning: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        choose_formats(None, None, tools=tools, reasoning=reasoning)


def test_any_two_formats_can_be_combined_but_for_channels() -> None:
    for tools, reasoning in product(TOOL_FORMATS, REASONING_FORMATS):
        if (tools == "harmony") == (reasoning == "harmony"):
            formats = choose_formats(None, tools=tools, reasoning=reasoning)
            assert message_of(events_of(["Hi", " {there}"], formats)).content == "Hi {there}"


def test_special_tokens_to_show() -> None:
    special = ["", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "[ARGS]", "[TOOL_CALLS]"]
    hermes = visible_special_tokens(formats_of("hermes", "think"), special)
    assert hermes == {"<tool_call>", "</tool_call>", "<think>"}
    assert visible_special_tokens(formats_of("mistral"), special) == {"[ARGS]", "[TOOL_CALLS]"}
    # A marker of ours may be longer than the token.
    tokens = ["<｜tool▁sep｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"]
    assert visible_special_tokens(formats_of("deepseek_v3"), tokens) == set(tokens[:2])
    assert visible_special_tokens(Formats(), special) == frozenset()


def structure_of(tool_choice: Any, formats: Formats | None = None, **options: Any) -> CallStructure:
    structure = call_structure(
        formats or formats_of("hermes", "think"), TOOLS, tool_choice, **options
    )
    assert structure is not None
    return structure


def test_structure_of_hermes() -> None:
    structure = structure_of("auto")
    assert structure.free_text
    assert not structure.at_most_one
    assert structure.triggers == ("<tool_call>",)
    assert structure.reasoning_ends == ("</think>",)
    assert [tag.begin for tag in structure.tags] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": '
        for name in ("get_weather", "search.web", "now")
    ]
    assert structure.tags[0].schema is TOOLS[0]["function"]["parameters"]
    assert structure.tags[2].schema == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert structure.tags[0].end == "}\n</tool_call>"


def test_strict_tools_are_marked() -> None:
    function = {**TOOLS[0]["function"], "strict": True}
    structure = call_structure(
        formats_of("hermes"), [{"type": "function", "function": function}, *TOOLS[1:]], "auto"
    )
    assert structure is not None
    assert [tag.strict for tag in structure.tags] == [True, False, False]


def test_structure_by_tool_choice() -> None:
    assert not structure_of("required").free_text
    assert not structure_of("required").at_most_one
    assert structure_of("required", parallel=False).at_most_one
    assert structure_of("auto", parallel=False).free_text
    named = structure_of(NAMED)
    assert len(named.tags) == 1
    assert named.at_most_one
    assert not named.free_text
    assert structure_of({"type": "function", "name": "now"}) == named


def test_nothing_to_enforce() -> None:
    assert call_structure(formats_of("hermes"), TOOLS, "none") is None
    assert call_structure(formats_of("hermes"), [], "auto") is None
    assert call_structure(formats_of(None, "think"), TOOLS, "auto") is None
    # A name does not tell whether a call begins; nor does a bracket, but both together do.
    assert call_structure(formats_of("glm4"), TOOLS, "auto") is None
    assert call_structure(formats_of("glm4"), TOOLS, "required") is not None
    names = ("get_weather", "search.web", "now")
    assert structure_of("auto", formats_of("pythonic")).triggers == tuple(f"[{n}(" for n in names)


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_model_that_cannot_call_is_not_made_to(tool_choice: Any) -> None:
    with pytest.raises(BadRequest, match="no tool calls") as caught:
        call_structure(formats_of(None, "think"), TOOLS, tool_choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "tool_choice", [{"type": "function", "function": {"name": "nope"}}, {"type": "function"}, {}]
)
def test_tool_choice_that_is_refused(tool_choice: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        call_structure(formats_of("hermes"), TOOLS, tool_choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_what_is_enforced_reads_back_as_calls(name: str) -> None:
    """Whitespace aside, within what the schema leaves open, this is all a grammar lets through."""
    formats = formats_of(name, "think")
    structure = structure_of("required", formats)
    texts = ['{"city": "a\\n</tool_call>"}', '{ "query":"" }', "{}"]
    calls = [tag.begin + text + tag.end for tag, text in zip(structure.tags, texts, strict=True)]
    text = structure.begin + structure.separator.join(calls) + structure.end
    assert text.startswith(structure.triggers) or name == "glm4"
    message = message_of(events_of([text], formats))
    arguments = [call.arguments for call in message.calls]
    if name in ("lfm2", "olmo3", "pythonic"):  # which are Python, and written anew
        texts = [json.dumps(json.loads(text)) for text in texts]
    assert arguments == texts
    assert [call.name for call in message.calls] == ["get_weather", "search.web", "now"]
    assert (message.content, message.reasoning) == ("", "")


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_separate_tags_in_a_row_read_back_as_calls(name: str) -> None:
    formats = formats_of(name, "think")
    structure = structure_of("required", formats)
    tags = structure.separate_tags()
    assert all(tag.begin.startswith(structure.triggers or "") for tag in tags)
    text = "".join(tag.begin + '{"a": "}"}' + tag.end for tag in tags)
    message = message_of(events_of([text], formats))
    assert [call.arguments for call in message.calls] == ['{"a": "}"}'] * 3
    assert [call.name for call in message.calls] == ["get_weather", "search.web", "now"]
    assert (message.content, message.reasoning) == ("", "")


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_what_is_enforced_may_follow_reasoning(name: str) -> None:
    formats = formats_of(name, "think")
    structure = structure_of(NAMED, formats)
    [tag] = structure.tags
    call = structure.begin + tag.begin + json.dumps({}) + tag.end + structure.end
    channels = formats.channels
    begin = f"{channels.channel}analysis{channels.message}" if channels else "<think>"
    text = begin + "Hm." + structure.reasoning_ends[0] + call
    message = message_of(events_of(text, formats))
    assert (message.content, message.reasoning) == ("", "Hm.")
    assert [(call.name, call.arguments) for call in message.calls] == [("now", "{}")]


@pytest.mark.parametrize(
    ("reason", "calls", "expected"),
    [
        (FinishReason.STOP, 0, "stop"),
        (FinishReason.STOP, 2, "tool_calls"),
        (FinishReason.LENGTH, 1, "length"),
        (FinishReason.ABORT, 1, "abort"),
    ],
)
def test_finish_reason(reason: FinishReason, calls: int, expected: str) -> None:
    assert finish_reason(reason, calls) == expected
