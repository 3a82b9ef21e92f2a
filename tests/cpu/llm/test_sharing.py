"""The program of ``tests/gpu/test_sharing.py``, on a CPU: engines of one process that count."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm import AsyncLLM
from tests.support.gpu import sharing
from tests.support.models.successor import make

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("successor") / "model", SIZES))


@pytest.mark.slow
async def test_an_engine_beside_another_that_starts_and_stops(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sharing, "ROWS", 3)
    await sharing.beside(folder, "cpu")
    assert capsys.readouterr().out.count("waiting:") == 3


async def test_wrong_tokens_are_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "ROWS", 2)
    monkeypatch.setattr(sharing, "successors", lambda prompt, count: [7] * count)
    async with AsyncLLM(folder, device="cpu", **sharing.OPTIONS) as llm:
        with pytest.raises(sharing.WrongTokens):
            await sharing.decode_batch(llm)
        with pytest.raises(ExceptionGroup) as caught:
            async with sharing.decoding(llm):
                await asyncio.sleep(60)
    assert caught.group_contains(sharing.WrongTokens)
