"""The promise: however a text is cut into pieces, the same message comes out."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.text.parsing import (
    Content,
    End,
    Formats,
    ToolArguments,
    ToolStart,
    calls_writer,
    message_of,
)
from asyncllm.text.parsing.formats import ChannelFormat, is_tag
from tests.support.text.parsing_texts import (
    TAGGED_NAMES,
    TEXT_NAMES,
    TOOL_NAMES,
    Call,
    events_of,
    formats_of,
    fragments,
    new_parser,
    read,
    written,
)

CALLS: list[Call] = [
    (
        "get_weather",
        {
            "city": 'Åre </tool_call> "[TOOL_CALLS]" <|end|> \\ {"name": "now"}\n<think>🙂',
            "days": -3,
            "exact": None,
            "area": {"lat": [1.5e-3, {}], "<|call|>": "```"},
        },
    ),
    ("now", {}),
    ("search.web", {"query": "", "limit": 0.5}),
]

TEXT_CALLS: list[Call] = [
    ("get_weather", {"city": ' "b" \\ \n\n<tool_call> é🙂 {', "days": 2, "area": [{"a": 1}]}),
    *CALLS[1:],
]

# Beside "think", which stands for all that use tags.
FORMATS = [formats_of(name, "think") for name in TAGGED_NAMES] + [
    formats_of("harmony"),
    formats_of("hermes", "granite"),
    formats_of("granite", "granite_tags"),
    formats_of("mistral_args", "mistral"),
    formats_of(None, "command"),
    formats_of(None, None),
]


def label(formats: Formats) -> str:
    tools, reasoning = formats.tools, formats.reasoning
    return f"{tools and tools.name}-{reasoning and reasoning.name}"


def assert_cuts_do_not_matter(text: str, formats: Formats, **options: Any) -> None:
    """Every cut in two, and pieces of every small size."""
    whole = events_of([text], formats, **options)
    for size in (1, 2, 3, 5, 8):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert events_of(pieces, formats, **options) == whole
    for at in range(1, len(text)):
        assert events_of([text[:at], text[at:]], formats, **options) == whole


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_calls_come_out_as_written_whatever_the_cut(name: str) -> None:
    calls = TEXT_CALLS if name in TEXT_NAMES else CALLS
    formats = formats_of(name, "think")
    text = written(name, calls)
    assert_cuts_do_not_matter(text, formats)
    events = events_of([text], formats)
    starts = [event for event in events if isinstance(event, ToolStart)]
    arguments = [event.text for event in events if isinstance(event, ToolArguments)]
    assert [(start.index, start.name) for start in starts] == [
        (index, name) for index, (name, _) in enumerate(calls)
    ]
    assert [json.loads(text) for text in arguments] == [arguments for _, arguments in calls]
    if name not in TEXT_NAMES:
        assert arguments == [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    assert events[-1] == End(len(calls), open_call=False, open_reasoning=False)
    assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_calls_that_we_write_are_read(name: str) -> None:
    calls = TEXT_CALLS if name in TEXT_NAMES else CALLS
    text = calls_writer(formats_of(name))(
        [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    )
    if name in ("harmony", "json"):
        assert text == written("hermes", calls)
        name = "hermes"
    message = read(text, name)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert message.content == ""


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_every_cut_of_truncated_calls(name: str) -> None:
    formats = formats_of(name, "think")
    text = written(name, [("get_weather", {"city": "Åre\n", "days": 1}), ("now", {})])
    for end in range(1, len(text), 3):
        whole = events_of([text[:end]], formats)
        assert events_of(text[:end], formats) == whole
        assert events_of([text[: end // 2], text[end // 2 : end]], formats) == whole


@pytest.mark.parametrize("name", TAGGED_NAMES)
def test_every_cut_of_a_text_with_everything(name: str) -> None:
    text = (
        "\n<think>\n Let me <tool_call> [TOOL_CALLS] {</thin </think>\n\n Sure:\n\n"
        + written(name, [("now", {}), ("get_weather", {"city": "x"})])
        + "\n\nDone <think>. {} <tool_call>{"
    )
    assert_cuts_do_not_matter(text, formats_of(name, "think"))


def test_every_cut_of_harmony_messages() -> None:
    text = (
        "<|channel|>analysis<|message|>I <b>must</b> call<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|> {} <|call|>"
        "<|start|>assistant<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
        "<|start|>assistant<|channel|>final<|message|>1 < 2<|chan<|return|>"
    )
    assert_cuts_do_not_matter(text, formats_of("harmony"))
    assert_cuts_do_not_matter("plain " + text, formats_of("harmony"))
    assert_cuts_do_not_matter(text, formats_of("harmony"), prompt="")


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[Formats, str, list[str]]:
    """A text made of well-formed calls and of what makes a parser stumble, and a cut of it."""
    formats = draw(st.sampled_from(FORMATS))
    parts = st.sampled_from(fragments(formats)) | st.text(max_size=5)
    if (tools := formats.tools) is not None:
        calls = st.lists(st.sampled_from(CALLS), min_size=1, max_size=2)
        parts |= st.builds(written, st.just(tools.name), calls)
    text = "".join(draw(st.lists(parts, max_size=10)))
    for _ in range(draw(st.integers(0, 3))):  # replace, insert or delete a little
        at = draw(st.integers(0, len(text)))
        skip = draw(st.integers(0, 8))
        text = text[:at] + draw(st.sampled_from(["", *fragments(formats)])) + text[at + skip :]
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    bounds = [0, *sorted(places), len(text)]
    return formats, text, [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.slow
@settings(max_examples=400)
@given(case=cut_texts(), in_reasoning=st.booleans())
def test_any_cut_of_any_text_gives_the_same(
    case: tuple[Formats, str, list[str]], in_reasoning: bool
) -> None:
    formats, text, pieces = case
    options = {} if formats.channels or not in_reasoning else {"prompt": "<think>\n"}
    whole = events_of([text], formats, **options)
    assert events_of(pieces, formats, **options) == whole
    assert events_of(text, formats, **options) == whole


@settings(max_examples=300)
@given(case=cut_texts(), in_reasoning=st.booleans(), cut_off=st.booleans())
def test_arguments_are_objects_and_markers_no_content(
    case: tuple[Formats, str, list[str]], in_reasoning: bool, cut_off: bool
) -> None:
    formats, text, _ = case
    parser = new_parser(formats, **({"prompt": "<think>\n"} if in_reasoning else {}))
    parser.record_places()
    events = parser.feed(text) + parser.finish(cut_off=cut_off)
    assert all(isinstance(json.loads(call.arguments), dict) for call in message_of(events).calls)
    tools = formats.tools
    if tools is not None:
        markers = tools.markers() if isinstance(tools, ChannelFormat) else tools.outer_markers()
        tags = [marker for marker in markers if is_tag(marker)]
        shown = ["\0"] * len(text)  # without what is no content, the rest may form a marker
        for start, end in parser.take_places():
            shown[start:end] = text[start:end]
        assert not any(tag in "".join(shown) for tag in tags)


@settings(max_examples=300)
@given(case=cut_texts(), in_reasoning=st.booleans())
def test_content_is_found_where_it_was_generated(
    case: tuple[Formats, str, list[str]], in_reasoning: bool
) -> None:
    formats, text, pieces = case
    parser = new_parser(formats, **({"prompt": "<think>\n"} if in_reasoning else {}))
    parser.record_places()
    for piece in [*pieces, None]:
        events = parser.finish() if piece is None else parser.feed(piece)
        content = [event.text for event in events if isinstance(event, Content)]
        assert "".join(content) == "".join(text[a:b] for a, b in parser.take_places())
