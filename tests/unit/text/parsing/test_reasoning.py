"""Reasoning: where it starts, where it ends, what is not reasoning; and messages on channels."""

from __future__ import annotations

import pytest

from asyncllm.text.parsing import End, Message, message_of
from tests.support.text.parsing_texts import TOOLS, events_of, formats_of, new_parser, parse_all
from tests.support.text.parsing_texts import read as read_message


def read(text: str, reasoning: str, **options: str) -> tuple[str, str]:
    message = parse_all(text, formats_of(None, reasoning), **options)
    return message.reasoning, message.content


@pytest.mark.parametrize(
    ("reasoning", "text", "expected"),
    [
        ("think", "<think>\nHm.\n</think>\n\nHi.", ("Hm.\n", "Hi.")),
        ("think", "\n <think></think>Hi.\n", ("", "Hi.\n")),
        ("think", "<think></think>\n<think>Hm.</think>Hi.", ("Hm.", "Hi.")),
        (
            "think",
            "<think>Is <think> one? </thin> </think",
            ("Is <think> one? </thin> </think", ""),
        ),
        ("think", "The tags <think> and </think>.", ("", "The tags <think> and </think>.")),
        ("think", "Hi.", ("", "Hi.")),
        ("think", "\n Hi.", ("", "\n Hi.")),
        ("think", "<thi", ("", "<thi")),
        ("think", " \n", ("", " \n")),
        ("mistral", "[THINK]Hm.[/THINK]Hi.", ("Hm.", "Hi.")),
        ("seed_oss", "<seed:think>Hm.</seed:think>Hi.", ("Hm.", "Hi.")),
        (
            "granite",
            "Here's my thought process: Hm.\n\nHere is my response: Hi.",
            ("Hm.\n\n", "Hi."),
        ),
        ("granite", "Here is the answer.", ("", "Here is the answer.")),
        (
            "granite_tags",
            "<think>Hm.</think>\n<response>\n<b>Hi</b>.</response>",
            ("Hm.", "<b>Hi</b>."),
        ),
        ("granite_tags", "<response>a</response>", ("", "a")),
        ("granite_tags", "A <response>a</response>", ("", "A <response>a</response>")),
        ("command", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("", "Hi.")),
        (
            "command",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>",
            ("Hm.", "Hi."),
        ),
    ],
)
def test_reasoning_comes_first(reasoning: str, text: str, expected: tuple[str, str]) -> None:
    assert read(text, reasoning) == expected


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>\n", "", ("a", "b")),  # DeepSeek R1
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", ("", "a</think>b")),  # Qwen 3, off
        ("<|im_start|>assistant\n", "", ("", "a</think>b")),  # Qwen 3, on: the model opens it
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", "", ("", "a</think>b")),
        ("<|im_start|>assistant\n<think>Well, ", "<think>Well, ", ("a", "b")),
        ("<|im_start|>assistant\n<think>\nWell, ", "Well, ", ("a", "b")),
        ("<think>\nHm.</think>Well, ", "Hm.</think>Well, ", ("", "a</think>b")),
        ("", "", ("", "a</think>b")),
    ],
)
def test_the_prompt_tells_where_the_text_starts(
    prompt: str, continued: str, expected: tuple[str, str]
) -> None:
    assert read("a</think>b", "think", prompt=prompt, continued=continued) == expected


def test_a_model_may_repeat_the_marker_of_the_prompt() -> None:
    assert read("<think>\na</think>b", "think", prompt="<think>\n") == ("a", "b")


def test_a_continued_answer_is_no_place_for_reasoning() -> None:
    prompt = "<|im_start|>assistant\nThe tag "
    assert read("<think>", "think", prompt=prompt, continued="The tag ") == ("", "<think>")


@pytest.mark.parametrize("before", ["Hi.", '{"name": "now", "parameters": {}}'])
def test_after_content_or_a_call_there_is_no_reasoning(before: str) -> None:
    message = read_message(before + "<|python_tag|> <think>Hm.</think>", "llama3_json", "think")
    assert message.reasoning == ""
    assert message.content.endswith("<think>Hm.</think>")


def test_reasoning_that_does_not_end_is_reported() -> None:
    assert events_of(["<think>Hm"], formats_of(None, "think"))[-1] == End(0, False, True)
    text = "<|channel|>analysis<|message|>Hm"
    assert events_of([text], formats_of("harmony"))[-1] == End(0, False, True)


ASSISTANT = "<|start|>assistant"
FINAL = ASSISTANT + "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<|channel|>analysis<|message|>Hm <|end|>{FINAL} Hi<|return|>", "Hm ", " Hi"),
        # a preamble for the user; messages whose ends or starts are left out
        (f"<|channel|>commentary<|message|>First.<|end|>{FINAL}Hi.", "", "First.Hi."),
        ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Hi", "Hm", "Hi"),
        (f"<|channel|>analysis<|message|>Hm{FINAL}Hi", "Hm", "Hi"),
        # a tool that was not offered: its channel tells what the text is
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", ""),
        (f"<|channel|>commentary to=functions.no <|message|>{{}}<|call|>{FINAL}Hi", "", "{}Hi"),
        ("<|channel|>analysis<|channel|>commentary to=a<|message|>b<|call|>", "", "b"),
        # no header, half a header, a header without end
        ("Hi <b> there", "", "Hi <b> there"),
        ("<|channel|>fin", "", ""),
        (f"<|channel|>final{FINAL}Hi", "", "Hi"),
        (f"<|channel|>{'x' * 600}", "", "x" * 600),
        ("Hi<|end|>", "", "Hi"),
        # markers where none belongs
        (f"<|end|><|message|>{FINAL}Hi<|constrain|> you<|message|>!", "", "Hi you!"),
    ],
)
def test_channels(text: str, reasoning: str, content: str) -> None:
    events = events_of([text], formats_of("harmony"))
    assert message_of(events) == Message(content, reasoning, [])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|end|><|start|>assistant", ("", "Hi")),
        ("<|start|>assistant<|channel|>analysis<|message|>", ("Hi", "")),
        ("<|start|>assistant<|channel|>analysis<|message|>Well,", ("Hi", "")),
        ("<|start|>assistant<|channel|>final<|message|>", ("", "Hi")),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>", ("", "Hi")),
    ],
)
def test_the_prompt_may_have_begun_a_message(prompt: str, expected: tuple[str, str]) -> None:
    message = message_of(events_of(["Hi"], formats_of("harmony"), prompt=prompt))
    assert (message.reasoning, message.content) == expected


def test_the_prompt_may_have_begun_a_call() -> None:
    prompt = "<|start|>assistant<|channel|>commentary to=functions.now"
    text = " <|constrain|>json<|message|>{}<|call|>"
    [call] = message_of(events_of([text], formats_of("harmony"), prompt=prompt)).calls
    assert (call.name, call.arguments) == ("now", "{}")


def test_in_reasoning_follows_the_channel() -> None:
    parser = new_parser(formats_of("harmony"), tools=TOOLS)
    told = []
    for piece in ("<|channel|>analysis", "<|message|>", "Hm", "<|end|>", ASSISTANT):
        parser.feed(piece)
        told.append(parser.in_reasoning)
    assert told == [False, True, True, False, False]
