"""``asyncllm generate``: files of prompts in, a resumable file of answers out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm.__main__ import main
from asyncllm.cli.prompts import read_rows
from asyncllm.errors import BadRequest, EngineDead, ModelError, StepError
from asyncllm.types import SamplingParams
from tests.support.server.echo_llm import EchoLLM, echo_class

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EchoLLM]]:
    """Puts the fake engine in the place of AsyncLLM."""
    echo = echo_class()
    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", echo)
    interval = sys.getswitchinterval()
    yield echo
    sys.setswitchinterval(interval)


def generate(file: Path, *options: str) -> int:
    return main(["generate", str(file), "-o", str(file.with_name("out.jsonl")), *options])


def results(file: Path) -> dict[int, Any]:
    lines = file.with_name("out.jsonl").read_bytes().decode().split("\n")
    assert lines.pop() == ""
    found = [json.loads(line) for line in lines]
    by_index = {result["index"]: result for result in found}
    assert len(by_index) == len(found), "an index is there twice"
    return by_index


# -- prompts ---------------------------------------------------------------------------------------


def test_txt_has_a_prompt_per_line(write: Write) -> None:
    rows = read_rows(write("p.txt", "\ufeffone\r\n\n two \u2028x\nGrüße"))
    assert [(row.index, row.prompt) for row in rows] == [
        (0, "one"),
        (1, " two \u2028x"),
        (2, "Grüße"),
    ]
    with pytest.raises(BadRequest, match="no fields"):
        read_rows(write("p.txt", "one\n"), "prompt")


def test_csv_has_a_prompt_in_a_column(write: Write) -> None:
    text = 'id,question\r\n1,"two\r\nlines, and a ""quote"""\r\n2,' + "x" * 200_000 + "\r\n"
    rows = read_rows(write("p.csv", text), "question")
    assert [row.prompt for row in rows] == ['two\r\nlines, and a "quote"', "x" * 200_000]
    assert [row.rest for row in rows] == [{"id": "1"}, {"id": "2"}]
    assert read_rows(write("p.csv", "only\nhi\n"))[0].prompt == "hi"
    assert read_rows(write("p.csv", "id,prompt\n1,hi\n"))[0].prompt == "hi"
    assert read_rows(write("p.csv", "prompt,id\nhi,1,too,many\n"))[0].rest == {"id": "1"}
    with pytest.raises(BadRequest, match="no column 'prompt' among id, question"):
        read_rows(write("p.csv", text))
    with pytest.raises(BadRequest, match="line 3: too few columns"):
        read_rows(write("p.csv", "id,prompt\n1,a\n2\n"))


def test_jsonl_has_text_ids_or_messages(write: Write) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "hi", "id": 1},
        {"prompt": [1, 2]},
        {"messages": messages},
    ]
    rows = read_rows(write("p.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert [row.prompt for row in rows] == ["hi", [1, 2], messages]
    assert [row.key for row in rows] == ["prompt", "prompt", "messages"]
    assert [row.rest for row in rows] == [{"id": 1}, {}, {}]
    assert read_rows(write("p.jsonl", '{"q": "hi", "prompt": 1}'), "q")[0].rest == {"prompt": 1}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: "),
        ("p.jsonl", '{"prompt": "a"}\n["a"]', "line 2: "),
        ("p.jsonl", '{"text": "a"}', "line 1: no .prompt. or .messages."),
        ("p.jsonl", '{"prompt": 1}', "line 1: 'prompt' is not text, token ids or chat messages"),
        ("p.jsonl", '{"prompt": [1, "a"]}', "line 1: 'prompt' is not"),
        ("p.jsonl", '{"prompt": [true]}', "line 1: 'prompt' is not"),
        ("p.txt", "\n\n", "no prompts"),
        ("p.csv", "", "no column"),
    ],
)
def test_a_bad_file_is_refused_before_anything_runs(
    write: Write,
    name: str,
    text: str,
    message: str,
    echo: type[EchoLLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(name, text)
    with pytest.raises(BadRequest, match=message):
        read_rows(path)
    assert generate(path) == 1
    assert str(path) in capsys.readouterr().err
    assert not echo.made


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "p.txt"
    assert generate(missing) == 1
    assert capsys.readouterr().err == f"asyncllm: error: {missing}: No such file or directory\n"


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(BadRequest, match="not UTF-8"):
        read_rows(path)


# -- answers ---------------------------------------------------------------------------------------


def test_a_line_for_each_prompt(
    write: Write, echo: type[EchoLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = write("p.jsonl", json.dumps({"prompt": "Grüße", "id": 5}) + "\n")
    with file.open("a") as more:
        more.write(json.dumps({"messages": messages}) + "\n")
    assert generate(file) == 0
    found = results(file)
    assert found[0] == {
        "index": 0,
        "prompt": "Grüße",
        "text": "Grüße",
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt_tokens": 8, "completion_tokens": 8, "cached_tokens": 0},
        "input": {"id": 5},
        "settings": found[1]["settings"],
    }
    assert found[1]["messages"] == messages
    assert found[1]["text"] == "user: hi\nassistant: "
    drawn = capsys.readouterr().err
    assert "2/2" in drawn
    assert "2 prompts answered, 0 failed: 29 tokens" in drawn
    assert "tok/s" in drawn


def test_options_reach_the_engine(write: Write, echo: type[EchoLLM]) -> None:
    file = write("p.txt", "abcdef\n")
    options = ["--max-tokens", "3", "--temperature", "0", "--model", "m", "--max-num-seqs", "3"]
    assert generate(file, *options) == 0
    assert results(file)[0]["text"] == "abc"
    [llm] = echo.made
    assert (llm.config.model, llm.config.max_num_seqs) == ("m", 3)
    assert llm.params == [SamplingParams(temperature=0, max_tokens=3)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"prompt": "abcdef"}\n{"prompt": "abcdef", "max_tokens": 2}\n'),
        ("p.csv", "prompt,Max_Tokens\nabcdef,\nabcdef,2\n"),
    ],
)
def test_a_prompt_may_have_its_own_max_tokens(
    name: str, text: str, write: Write, echo: type[EchoLLM]
) -> None:
    file = write(name, text)
    assert generate(file, "--max-tokens", "4", "--temperature", "0") == 0
    assert [results(file)[i]["text"] for i in range(2)] == ["abcd", "ab"]
    assert {params.temperature for params in echo.made[0].params} == {0}
    assert generate(file, "--overwrite") == 0
    assert [results(file)[i]["text"] for i in range(2)] == ["abcdef", "ab"]


@pytest.mark.parametrize("value", ["0", "1.5", "true", '"many"'])
def test_a_wrong_max_tokens_is_refused_before_a_model_is_loaded(
    value: str, write: Write, echo: type[EchoLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("p.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "b", "max_tokens": {value}}}\n')
    assert generate(file) == 1
    assert f"{file}: line 2: 'max_tokens' " in capsys.readouterr().err
    assert not echo.made


def test_more_prompts_than_the_queue_holds(write: Write, echo: type[EchoLLM]) -> None:
    file = write("p.txt", "".join(f"{i}\n" for i in range(500)))
    assert generate(file) == 0
    assert [results(file)[i]["text"] for i in range(500)] == [str(i) for i in range(500)]


def test_failed_prompts_are_recorded_and_tried_again(
    write: Write, echo: type[EchoLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("p.txt", f"a\n{'b' * 5000}\nc\n")
    assert generate(file) == 1
    failed = results(file)[1]
    assert failed["index"] == 1
    reason = "This model's maximum context length is 4096 tokens"
    [said] = re.findall("^the first that failed: (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert reason in said
    assert failed["error"].startswith(reason)
    assert generate(file) == 1
    assert len(echo.made[1].params) == 0, "only the failed one, which never gets to the queue"
    answered = file.with_name("out.jsonl").read_bytes()
    assert len(results(file)) == 3
    write("p.txt", "a\nb\nc\n")
    assert generate(file) == 0
    assert results(file)[1]["text"] == "b"
    assert b'"error"' in answered
    assert b'"error"' not in file.with_name("out.jsonl").read_bytes()


def test_a_failed_step_is_recorded_but_a_dead_engine_ends_the_run(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("p.txt", "a\nb\nc\n")
    monkeypatch.setattr(
        "asyncllm.llm.async_llm.AsyncLLM", echo_class(step_error=StepError("it broke"))
    )
    assert generate(file) == 1
    assert [result["error"] for result in results(file).values()] == ["it broke"] * 3
    monkeypatch.setattr(
        "asyncllm.llm.async_llm.AsyncLLM", echo_class(step_error=EngineDead("it is dead"))
    )
    assert generate(file) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "asyncllm: error: it is dead"
    assert results(file) == {}


# -- resuming --------------------------------------------------------------------------------------


def test_nothing_is_done_twice(write: Write, echo: type[EchoLLM]) -> None:
    file = write("p.txt", "a\nb\nc\n")
    assert generate(file) == 0
    whole = file.with_name("out.jsonl").read_bytes()
    assert generate(file) == 0
    assert len(echo.made) == 1, "no model is loaded when there is nothing to do"
    assert file.with_name("out.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_every_cut_of_the_results_is_repaired(write: Write, echo: type[EchoLLM]) -> None:
    file = write("p.txt", "a\nbb\nGrüße\n")
    assert generate(file) == 0
    out = file.with_name("out.jsonl")
    whole, expected = out.read_bytes(), results(file)
    for cut in range(0, len(whole), 7):
        out.write_bytes(whole[:cut])
        assert generate(file) == 0
        assert results(file) == expected
        complete = whole[:cut].count(b"\n")
        assert len(echo.made[-1].params) == 3 - complete
        kept = whole[: whole[:cut].rfind(b"\n") + 1]
        assert out.read_bytes().startswith(kept)


def test_new_prompts_at_the_end_are_added(write: Write, echo: type[EchoLLM]) -> None:
    assert generate(write("p.txt", "a\nb\n")) == 0
    file = write("p.txt", "a\nb\nc\n")
    assert generate(file) == 0
    assert len(echo.made[1].params) == 1
    assert results(file)[2]["text"] == "c"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [("a\nX\n", "line 2, .*prompt 1 is a different one"), ("a\n", "line 2, .*only 1 prompts")],
)
def test_results_for_other_prompts_are_left_alone(
    write: Write,
    echo: type[EchoLLM],
    capsys: pytest.CaptureFixture[str],
    prompts: str,
    message: str,
) -> None:
    file = write("p.txt", "a\nb\n")
    out = file.with_name("out.jsonl")
    assert generate(file, "--max-num-seqs", "1") == 0
    out.write_text("".join(sorted(out.read_text().splitlines(keepends=True))))
    before = out.read_bytes()
    write("p.txt", prompts)
    assert generate(file) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error)
    assert "--overwrite" in error
    assert out.read_bytes() == before
    assert generate(file, "--overwrite") == 0
    assert len(results(file)) == prompts.count("\n")


@pytest.mark.parametrize(
    "options", [["--temperature", "0"], ["--model", "other"], ["--chat"], ["--stop", "x"]]
)
def test_answers_of_other_settings_are_not_resumed(
    options: list[str], write: Write, echo: type[EchoLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("p.txt", "a\nb\n")
    assert generate(file) == 0
    before = file.with_name("out.jsonl").read_bytes()
    assert generate(file, *options) == 1
    assert "the model or the sampling options were different" in capsys.readouterr().err
    assert file.with_name("out.jsonl").read_bytes() == before
    assert generate(file, "--max-num-seqs", "2") == 0, "answers do not depend on it"
    assert generate(file, *options, "--overwrite") == 0
    assert generate(file, *options) == 0


def test_another_max_tokens_of_a_prompt_is_not_resumed(
    write: Write, echo: type[EchoLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("p.jsonl", '{"prompt": "abc", "max_tokens": 1}\n')
    assert generate(file) == 0
    write("p.jsonl", '{"prompt": "abc", "max_tokens": 2}\n')
    assert generate(file) == 1
    assert "options were different" in capsys.readouterr().err


def test_a_file_that_holds_something_else_is_left_alone(write: Write, echo: type[EchoLLM]) -> None:
    file = write("p.txt", "a\n")
    out = write("out.jsonl", "my precious notes\n")
    assert generate(file) == 1
    assert out.read_text() == "my precious notes\n"


def test_a_model_that_cannot_be_loaded_costs_no_results(
    write: Write, echo: type[EchoLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("p.txt", "a\nb\n")
    assert generate(file) == 0
    expected = results(file)
    no_model = echo_class(load_error=ModelError("no such model"))
    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", no_model)
    assert generate(file, "--overwrite") == 1
    assert results(file) == expected
    assert generate(file.with_name("p.txt"), "-o", str(file.parent / "no" / "out.jsonl")) == 1
    assert len(no_model.made) == 1, "a file that cannot be written shows before a model is loaded"


PROGRAM = """
import sys
import asyncllm.llm.async_llm
from asyncllm.__main__ import main
from tests.support.server.echo_llm import echo_class
asyncllm.llm.async_llm.AsyncLLM = echo_class(step_seconds=0.02)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_goes_on_after_a_signal(
    write: Write, echo: type[EchoLLM], number: signal.Signals
) -> None:
    prompts = [f"{i:0{2 + i % 5}}" for i in range(100)]
    file = write("p.txt", "".join(f"{prompt}\n" for prompt in prompts))
    out = file.with_name("out.jsonl")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "generate", str(file), "-o", str(out)],
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 20
    while not out.exists() or out.read_bytes().count(b"\n") < 10:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=10)
    done = out.read_bytes().count(b"\n")
    assert 10 <= done < 100
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; the same command goes on from here" in errors
        assert "Traceback" not in errors
    assert generate(file) == 0
    assert len(echo.made[0].params) == 100 - done
    assert [results(file)[i]["text"] for i in range(100)] == prompts
