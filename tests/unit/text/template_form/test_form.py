"""What is done with messages that a template cannot place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import BadRequest
from asyncllm.text import ChatTemplate
from asyncllm.text.parsing import calls_writer, choose_formats
from tests.support.text.conversations import FAMILIES, SPECIAL_TOKENS, template_of

QUESTION = {"role": "user", "content": "Why?"}
NEXT = {"role": "user", "content": "And now?"}
SYSTEM = {"role": "system", "content": "Be brief."}
NOTE = {"role": "system", "content": "A note."}
ANSWER = {"role": "assistant", "content": "Because."}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A key."}},
            "required": ["key"],
        },
    },
}

_NOTHING: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]

every_family = pytest.mark.parametrize("name", FAMILIES)


def call(arguments: Any = '{"key": "value"}', id: str = "call_1", name: str = "find") -> Any:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls or [call()]), **fields}


def result(content: Any = "found", id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def prompt(name: str, *messages: dict[str, Any], tools: Any = None) -> str:
    return template_of(name).render(messages, tools=tools)


@every_family
@pytest.mark.parametrize("after", [[], [ANSWER], [ANSWER, NEXT], [NOTE, calling(call(id="2"))]])
def test_an_answer_without_text_is_one_with_an_empty_text(name: str, after: Any) -> None:
    prompts = {prompt(name, QUESTION, calling(**content), result(), *after) for content in _NOTHING}
    assert len(prompts) == 1


def test_a_template_that_prints_null_may() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}[{{ m.role }}]{{ m.content | default(none) | tojson }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    assert "[assistant]null{" in template.render([QUESTION, calling(content=None), result()])


@every_family
@pytest.mark.parametrize("nothing", ["", " ", "null", "{}", {}, None])
def test_no_arguments_are_an_empty_object(name: str, nothing: Any) -> None:
    made = prompt(name, QUESTION, calling(call(nothing)), result())
    assert made == prompt(name, QUESTION, calling(call("{}")), result())


@every_family
@settings(max_examples=15, deadline=None)
@given(
    arguments=st.one_of(
        st.text(),
        st.builds(lambda text, end: text[:end], st.text().map(json.dumps), st.integers(0, 9)),
        st.lists(st.none() | st.text(max_size=3), max_size=2).map(json.dumps),
        st.sampled_from(
            ('{"city": "Zu', '{"p": "C:\\Users\\x"}', "{'a': 1}", '"text"', "[" * 99999, "1e999")
        ),
    )
)
def test_what_a_model_wrote_for_arguments_is_passed_on(name: str, arguments: str) -> None:
    made = prompt(name, QUESTION, calling(call(arguments)), result("not valid"))
    assert "not valid" in made


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"chatml"}))
def test_the_text_of_malformed_arguments_reaches_the_model(name: str) -> None:
    made = prompt(name, QUESTION, calling(call("{city: Zurich")), result("not valid"))
    assert "city: Zurich" in made


@pytest.mark.parametrize("ids", [("call_49c89af0aa", "toolu_01A09q"), ("a", "b"), (None, None)])
def test_foreign_ids_get_the_form_that_a_template_wants(ids: Any) -> None:
    first, second = (call(id=id) for id in ids)
    results = [result("one", ids[0]), result("two", ids[1])]
    for each in (first, second, *results):
        for key in ("id", "tool_call_id"):
            if each.get(key, 0) is None:
                del each[key]
    made = prompt("mistral", QUESTION, calling(first, second), *results)
    calls, *answers = (part.split('"') for part in made.split("[TOOL_RESULTS]"))
    given = [calls[i + 2] for i, word in enumerate(calls) if word == "id"]
    assert len(set(given)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in given)
    assert [answer[answer.index("call_id") + 2] for answer in answers] == given


def test_ids_of_the_right_form_are_kept() -> None:
    conversation = [QUESTION, calling(call(id="abcdef123")), result(id="abcdef123")]
    assert prompt("mistral", *conversation).count("abcdef123") == 2
    named = "functions.find:7"
    conversation = [QUESTION, calling(call(id=named)), result(id=named)]
    assert prompt("kimi", *conversation).count(named) == 2
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    assert ChatTemplate(template).render([QUESTION, calling(), result()]).count("call_1") == 2


@pytest.mark.parametrize(
    "ids", [("toolu_01A", "toolu_01B"), ("functions.open:3", "a"), (None,) * 2]
)
def test_ids_name_the_function_where_the_template_prints_nothing_else(ids: Any) -> None:
    """Whatever the API: Ollama's has no ids."""
    calls = [call(id=id, name=name) for id, name in zip(ids, ("find", "open"), strict=True)]
    results = [{**result(text), "tool_call_id": id} for text, id in zip("ab", ids, strict=True)]
    for order in (1, -1) if ids[0] else (1,):
        made = prompt("kimi", QUESTION, calling(*calls), *results[::order])
        for name in ("functions.find:0", "functions.open:1"):
            assert made.count(name) == 2
        assert made.index("Return of functions.find:0\na") > 0
        assert made.index("Return of functions.open:1\nb") > 0


@every_family
def test_a_later_system_message_stays_where_it_is(name: str) -> None:
    made = prompt(name, SYSTEM, QUESTION, ANSWER, NOTE, NEXT)
    places = [made.index(text) for text in ("Because.", "A note.", "And now?")]
    assert places == sorted(places)
    begun = prompt(name, SYSTEM, QUESTION)
    longer = prompt(name, SYSTEM, QUESTION, ANSWER)
    assert made.startswith(longer[: longer.index("Because.")])
    assert begun.index("Be brief.") == made.index("Be brief.")


@pytest.mark.parametrize("name", ["qwen35", "llama2", "mistral", "gemma3", "gpt_oss"])
def test_system_messages_at_the_start_become_one(name: str) -> None:
    one = {"role": "system", "content": "Be brief.\n\nA note."}
    assert prompt(name, SYSTEM, NOTE, QUESTION) == prompt(name, one, QUESTION)
    developer = {**NOTE, "role": "developer"}
    assert prompt(name, SYSTEM, developer, QUESTION) == prompt(name, one, QUESTION)


def test_without_system_messages_the_text_begins_the_first_question() -> None:
    assert "user\nBe brief.\n\nWhy?<end_of_turn>" in prompt("gemma2", SYSTEM, QUESTION)


@every_family
def test_what_a_user_says_beside_a_result_follows_it(name: str) -> None:
    made = prompt(name, QUESTION, calling(), result("found"), NEXT)
    assert made.index("found") < made.index("And now?")


@pytest.mark.parametrize("name", ["llama3", "gpt_oss"])
def test_calls_that_must_stand_alone_follow_one_another(name: str) -> None:
    first, second = call(id="1", name="one"), call(id="2", name="two")
    both = prompt(name, QUESTION, calling(first, second), result("r2", "2"), result("r1", "1"))
    alone = prompt(
        name, QUESTION, calling(first), result("r1", "1"), calling(second), result("r2", "2")
    )
    assert both == alone


#: Whose templates print no calls; some of them print results. Where nothing else says so, a model
#: is taken to write calls as Hermes does.
WITHOUT_CALLS = {
    **{name: FAMILIES[name] for name in ("chatml", "llama2", "gemma2", "gemma3", "phi3")},
    "results as a user's": (
        "{%- for m in messages -%}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
        "{{ '<result>' ~ m.content if m.role == 'tool' else m.content }}{%- endfor -%}"
    ),
    "calls are mentioned": (
        "{%- if tools -%}Write <|tool_call_start|>[f(a=1)]<|tool_call_end|>: {{ tools }}"
        "{%- endif -%}"
        "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- endfor -%}"
    ),
    "results follow calls": (
        "{%- for m in messages -%}{%- set before = messages[loop.index0 - 1] -%}"
        "{%- if m.role == 'tool' and not before.tool_calls and before.role != 'tool' -%}"
        "{{ raise_exception('no call') }}{%- endif -%}<|{{ m.role }}|>{{ m.content }}{%- endfor -%}"
    ),
    "words": (
        "{%- for m in messages if m.role in ('user', 'assistant') -%}"
        "{{ 'Human: ' if m.role == 'user' else 'Bot: ' }}{{ m.content }}\n{%- endfor -%}Bot:"
    ),
}


@pytest.mark.parametrize("name", WITHOUT_CALLS)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "I look."}])
def test_a_template_without_calls_gets_them_as_text(name: str, content: Any) -> None:
    template = ChatTemplate(WITHOUT_CALLS[name], SPECIAL_TOKENS)
    broken = call('{"half', "call_2", "open")
    made = template.render(
        [
            QUESTION,
            calling(call(), broken, **content),
            *(result("it was found"), result("no JSON", "call_2")),
            calling(call('{"key": ["a", 1]}', "call_3", "list"), **content),
            result("so it is", "call_3"),
            *(ANSWER, NEXT),
        ]
    )
    words = [
        *(["I look."] if content.get("content") else []),
        '<tool_call>\n{"name": "find", "arguments": {"key": "value"}}\n</tool_call>\n',
        '<tool_call>\n{"name": "open", "arguments": {"arguments": "{\\"half"}}\n</tool_call>',
        *("it was found", "no JSON"),
        '<tool_call>\n{"name": "list", "arguments": {"key": ["a", 1]}}\n</tool_call>',
        *("so it is", "Because.", "And now?"),
    ]
    at = 0
    for word in words:
        at = made.index(word, at)
    assert "calls (they are written as text)" in template.cannot
    if "Result of" in made:  # a user says which call it answers
        assert [made.count(f"Result of {each}:\n") for each in ("find", "open", "list")] == [1] * 3
    last = template.render([QUESTION, calling(**content)])
    assert '{"name": "find", "arguments": {"key": "value"}}' in last
    begun = template.render([QUESTION, calling(**content), result("it was found")])
    assert begun.startswith(last[: last.index("value")])


@pytest.mark.parametrize("name", ["llama2", "gemma2", "gemma3", "phi3", "words"])
def test_results_that_a_template_does_not_print_are_told_by_a_user(name: str) -> None:
    template = ChatTemplate(WITHOUT_CALLS[name], SPECIAL_TOKENS)
    made = template.render([QUESTION, calling(), result("it was found")])
    assert "Result of find:\nit was found" in made


def test_calls_as_text_are_written_as_the_model_writes_them() -> None:
    template = ChatTemplate(WITHOUT_CALLS["calls are mentioned"])
    formats = choose_formats(template, "lfm2")
    made = template.with_calls(calls_writer(formats)).render(
        [QUESTION, calling(call('{"key": "it\'s", "all": null}'), call({}, "2", "open")), result()]
    )
    assert """<|tool_call_start|>[find(key="it's", all=None), open()]<|tool_call_end|>""" in made
    assert "<tool_call>" in template.render([QUESTION, calling(), result()])


@every_family
@pytest.mark.parametrize("left_out", [("description",), ("parameters",)], ids=str)
@pytest.mark.parametrize("null", [False, True])
def test_optional_fields_of_a_tool(name: str, left_out: Any, null: bool) -> None:
    function = {key: value for key, value in TOOL["function"].items() if key not in left_out}
    function |= dict.fromkeys(left_out) if null else {}
    made = prompt(name, QUESTION, tools=[{"type": "function", "function": function}])
    assert "None" not in made
    assert "null" not in made
    if name in ("gpt_oss", "hermes"):  # which take a description for granted
        empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
        whole = {**empty, **{k: v for k, v in function.items() if v is not None}}
        assert made == prompt(name, QUESTION, tools=[{"type": "function", "function": whole}])


@every_family
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"key": {}}},
        {"type": "object", "properties": {"key": {"type": ["integer", "null"]}}},
        {"type": "object", "properties": {"key": {"anyOf": [{"type": "null"}, {"$ref": "#/a"}]}}},
        {"type": "object", "properties": {"key": True}},
        {"oneOf": [{"type": "object"}]},
        {"type": "object", "properties": None, "required": None},
    ],
    ids=str,
)
def test_any_schema_of_a_tool(name: str, schema: Any) -> None:
    function = {"name": "find", "parameters": schema}
    assert "find" in prompt(name, QUESTION, tools=[{"type": "function", "function": function}])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3", "granite", "glm", "kimi", "mistral"])
def test_a_whole_tool_is_printed_as_it_is(name: str) -> None:
    indent = 4 if name in ("llama3", "granite") else None
    text = json.dumps(TOOL, ensure_ascii=False, indent=indent)
    assert text in prompt(name, QUESTION, tools=[TOOL])


@pytest.mark.parametrize("name", ["chatml", "deepseek", "phi3", "llama2", "gemma2", "gemma3"])
@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_a_template_without_tools_gets_them_as_text(name: str, before: Any) -> None:
    other = {"type": "function", "function": {"name": "list", "parameters": {}}}
    made = prompt(name, *before, QUESTION, tools=[TOOL, other])
    places = [
        made.index(text)
        for text in (
            json.dumps(TOOL["function"]),
            '{"name": "list", "parameters": {}}',
            '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>',
            *(["Be brief."] if before else []),
            "Why?",
        )
    ]
    assert places == sorted(places)
    assert "tools (they are described" in template_of(name).cannot
    nothing: list[Any] = [None, []]
    for tools in nothing:
        assert prompt(name, *before, QUESTION, tools=tools) == prompt(name, *before, QUESTION)


def test_a_malformed_conversation_that_a_template_refuses_in_every_form() -> None:
    with pytest.raises(BadRequest, match="chat template: no"):
        ChatTemplate("{{ raise_exception('no') }}").render([QUESTION, ANSWER])


def test_a_template_that_changes_texts_is_taken_as_it_is() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}{% endfor %}"
    )
    assert (
        template.render([SYSTEM, QUESTION, ANSWER])
        == "[system]BE BRIEF.[user]WHY?[assistant]BECAUSE."
    )


def test_what_a_template_cannot_do_is_said() -> None:
    assert template_of("qwen2").cannot == ""
    assert "calls (they are written as text)" in template_of("chatml").cannot
    assert "system messages after the first" in template_of("qwen35").cannot
    for clause in ("any id of a call", "two user turns in a row", "text beside calls"):
        assert clause in template_of("mistral").cannot
    several = ChatTemplate({"default": FAMILIES["gemma2"], "tool_use": FAMILIES["qwen2"]})
    assert several.cannot.startswith("default: system messages")


def test_a_marker_that_a_template_refuses_in_an_answer() -> None:
    """gpt-oss's refuses answers with the beginning of a marker; a model may have written it."""
    made = prompt("gpt_oss", QUESTION, {**ANSWER, "content": "So: <|channel|>final"}, NEXT)
    assert "So: < |channel|>final" in made
