"""Published logs of requests: three formats, told apart by their first line."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.engine.recording.trace_file import TraceError
from asyncllm.errors import BadRequest
from tools.bench_policies.load import Load, LoadRequest
from tools.bench_policies.request_log import read_log

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 1536, "output_length": 5, "hash_ids": [0, 1, 3]}

{"timestamp": 3000, "input_length": 40, "output_length": 9, "hash_ids": [7]}
{"timestamp": 2000, "input_length": 700, "output_length": 0, "hash_ids": [0, 4]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:00.2500001,396,109
2023-11-17 00:00:01.5000000,0,3
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 01:59:59.500000+02:00,374,44
2024-05-10 00:00:00.250000+00:00,396,109
2024-05-10 00:00:01+00:00,7,0
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
118.5,GPT-4,1360,152,1512,API log
"""
NEW_BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,2.5,ChatGPT,472,18,490,Conversation log
45,2,3.5,ChatGPT,1087,230,1317,"Conversation, log"
60,2,,GPT-4,417,0,417,API log
"""


def read(folder: Path, text: str) -> Load:
    path = folder / "some.log"
    path.write_text(text, encoding="utf-8")
    return read_log(path)


def test_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    load = read(tmp_path, MOONCAKE)
    assert load.name == "some"
    assert load.requests == [
        LoadRequest(0.0, 1100, 20, (0, 1, 2)),
        LoadRequest(0.5, 1536, 5, (0, 1, 3)),
        LoadRequest(3.0, 40, 9, (7,)),
    ]
    assert load.skipped == {"without output": 1}


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024])
def test_azure_has_dates_with_and_without_a_timezone(tmp_path: Path, text: str) -> None:
    load = read(tmp_path, text)
    first, second = load.requests
    assert second.arrival - first.arrival == pytest.approx(0.75)
    assert [(r.num_prompt, r.num_output, r.blocks) for r in load.requests] == [
        (374, 44, ()),
        (396, 109, ()),
    ]
    assert sum(load.skipped.values()) == 1


@pytest.mark.parametrize("text", [BURSTGPT, NEW_BURSTGPT])
def test_burstgpt_is_read_by_the_names_of_its_columns(tmp_path: Path, text: str) -> None:
    load = read(tmp_path, text)
    assert load.requests[:2] == [LoadRequest(5.0, 472, 18), LoadRequest(45.0, 1087, 230)]
    assert load.skipped == {"without output": 1}


def test_a_byte_order_mark_and_other_line_ends_are_fine(tmp_path: Path) -> None:
    load = read(tmp_path, "\ufeff" + AZURE_2023.replace("\n", "\r\n"))
    assert len(load.requests) == 2


def test_any_numbers_may_name_blocks(tmp_path: Path) -> None:
    ids = (2**64 - 1, 2**31, 0)
    load = read(tmp_path, MOONCAKE.replace("[0, 1, 3]", str(list(ids))))
    assert load.requests[1].blocks == ids
    assert load.cached(16) == [0, 0, 0]


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    head, first, second, *_ = AZURE_2023.splitlines()
    load = read(tmp_path, "\n".join([head, second, first]))
    assert [r.num_prompt for r in load.requests] == [374, 396]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE.replace("500", '"soon"'), "line 2: Expected `float`, got `str`"),
        (MOONCAKE.replace('"input_length": 40', '"input_length": -4'), "line 4: Expected `int` >="),
        (MOONCAKE.replace("[0, 1, 3]", "[0, 1, 3, 9]"), "line 2: 4 hash_ids, but a prompt of 1536"),
        (MOONCAKE.replace("[7]}", "[7]"), "line 4: Input data was truncated"),
        (MOONCAKE.replace('"hash_ids": [7]', '"hash": [7]'), "line 4: Object missing required"),
        (AZURE_2023.replace("374", "many"), "line 2: Expected `int`, got `str` - at `$.ContextTok"),
        (AZURE_2023.replace("2023-11-17 00:00:01", "yesterday"), "line 4: Invalid isoformat"),
        (AZURE_2023.replace(",396,109", ",396"), "line 3: Expected `int`, got `null`"),
        (BURSTGPT.replace("118.5", "nan"), "line 5: Expected `float` >= 0"),
        (BURSTGPT.replace("230", "2.5"), "line 3: Expected `int`"),
        ("Timestamp,Tokens\n1,2\n", "its first line is no JSON object and does not name the"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("", "its first line is no JSON object"),
    ],
)
def test_damage_is_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        read(tmp_path, text)
    assert str(tmp_path / "some.log") in str(error.value)
    assert message in str(error.value)


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    for name, message in (("a", "is no text"), ("b", "No such file")):
        with pytest.raises(TraceError, match=message):
            read_log(tmp_path / name)


def test_what_is_selected_comes_faster_and_fits(tmp_path: Path) -> None:
    load = read(tmp_path, BURSTGPT)
    assert [r.arrival for r in load.select(longest=2000, speed=4).requests] == [0.0, 10.0, 28.375]
    assert [r.arrival for r in load.select(longest=2000, seconds=50).requests] == [0.0, 40.0]
    assert len(load.select(longest=2000, first=1).requests) == 1
    short = load.select(longest=1317)
    assert [r.num_prompt for r in short.requests] == [472, 1087]
    assert short.skipped == {"without output": 1, "longer than 1,317 tokens": 1}
    with pytest.raises(BadRequest, match="no request of at most 9 tokens"):
        load.select(longest=9)
