"""``--chat-template FILE``: a chat template in place of the model's own."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from asyncllm import AsyncLLM
from asyncllm.__main__ import main
from asyncllm.errors import ModelError

CHAT = [{"role": "user", "content": "Hello"}]
OWN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} =>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    return path


async def test_it_is_used_instead_of_the_models_own(file: Path) -> None:
    async with AsyncLLM(device="sim", chat_template=str(file)) as llm:
        ids = await llm.encode_chat(CHAT)
        bos = llm.tokenizer.decode(ids, skip_special_tokens=False).removesuffix("[user] Hello =>")
        assert await llm.encode(f"{bos}[user] Hello =>", add_special_tokens=False) == ids
    async with AsyncLLM(device="sim") as llm:
        assert await llm.encode_chat(CHAT) != ids


async def test_it_may_be_given_as_text() -> None:
    async with AsyncLLM(device="sim", chat_template=OWN) as llm:
        text = llm.tokenizer.decode(await llm.encode_chat(CHAT))
        assert text.endswith("[user] Hello =>")


async def test_variables_that_a_request_does_not_give() -> None:
    template = "{{ mood }} {{ place }}"
    given = {"mood": "calm", "place": "here"}
    async with AsyncLLM(
        device="sim", chat_template=template, default_chat_template_kwargs=given
    ) as llm:
        assert llm.tokenizer.decode(await llm.encode_chat(CHAT)) == "calm here"
        assert llm.tokenizer.decode(await llm.encode_chat(CHAT, mood="busy")) == "busy here"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n{% if x %}", r"own.jinja, line 2: Unexpected end"),
        (b"{{ x | nonsense }}", r"own.jinja, line 1: No filter named 'nonsense'"),
        (b"\xff", "own.jinja is not UTF-8"),
        (None, "cannot read chat_template .*own.jinja: No such file"),
    ],
)
def test_a_bad_one_is_refused_before_anything_is_loaded(
    file: Path, content: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    monkeypatch.setattr("asyncllm.llm.load.resolve_folder", lambda *_: pytest.fail("too late"))
    with pytest.raises(ModelError, match=message):
        asyncio.run(AsyncLLM("org/model", chat_template=str(file)).start())


def test_on_the_command_line_it_is_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    line = ["chat", "--device", "sim", "--chat-template", str(file), "--max-tokens", "3"]
    assert main(line) == 0
    capsys.readouterr()
    file.write_text("{% if %}")
    assert main(line) == 1
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"asyncllm: error: --chat-template {file}, line 1: ")
