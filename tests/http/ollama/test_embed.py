"""Ollama's /api/embed and /api/embeddings, by Ollama's own client and byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import ollama
import pytest

from asyncllm import EmbeddingParams
from tests.support.server.fake_llm import MAX_LEN, hidden_of
from tests.support.server.ollama_client import client
from tests.support.server.serving import Answer, Server

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"


def vector(last: str, **fields: Any) -> list[float]:
    """Of a text that ends so."""
    found: list[float] = EmbeddingParams(**fields).vector(hidden_of([ord(last)])).tolist()
    return found


def refused(answer: Answer, status: int) -> str:
    assert answer.status == status, answer.body
    assert answer.json.keys() == {"error"}
    message: str = answer.json["error"]
    return message


def test_the_official_client(server: Server) -> None:
    with client(server) as ours:
        answer = ours.embed("fake", ["ab", "c"], keep_alive="5m", options={"temperature": 0})
        assert answer.embeddings == [vector("b"), vector("c")]
        assert (answer.model, answer.prompt_eval_count) == ("fake", 5)
        assert answer.total_duration is not None
        assert answer.load_duration is not None
        assert 0 < answer.load_duration < answer.total_duration < 20e9
        assert ours.embed("fake:latest", "é", dimensions=2).embeddings == [
            EmbeddingParams(dimensions=2).vector(hidden_of([0xA9])).tolist()
        ]
        assert ours.embeddings("fake", "ab").embedding == vector("b")
        with pytest.raises(ollama.ResponseError, match="not found"):
            ours.embed("other", "a")


def test_vectors_have_length_one(server: Server) -> None:
    [found] = server.post(EMBED, {"model": "fake", "input": "abc"}).json["embeddings"]
    assert np.linalg.norm(found) == pytest.approx(1)


@pytest.mark.parametrize("fields", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_without_input_the_model_is_loaded(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post(EMBED, {"model": "fake", **fields})
    assert answer.status == 200
    assert answer.json["embeddings"] == []
    assert answer.json["prompt_eval_count"] == 0
    answer = server.post(EMBEDDINGS, {"model": "fake", "prompt": ""})
    assert (answer.status, answer.json) == (200, {"embedding": []})


def test_long_texts_are_cut(server: Server) -> None:
    long = "ab" + "c" * MAX_LEN
    answer = server.post(EMBED, {"model": "fake", "input": [long, "a"]})
    assert answer.json["prompt_eval_count"] == MAX_LEN + 2
    assert server.llm.params, "it was served"
    assert server.post(EMBEDDINGS, {"model": "fake", "prompt": long}).status == 200
    uncut = {"model": "fake", "input": long, "truncate": False}
    assert "maximum context length" in refused(server.post(EMBED, uncut), 400)
    first = server.post(EMBED, {"model": "fake", "input": "b" * (MAX_LEN - 1) + "z"})
    assert first.json["embeddings"] == [vector("b")], "the beginning is kept, BOS included"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": ["a", ""]},
        {"input": ["a", 5]},
        {"input": 5},
        {"input": ["a"] * 17},
        {"dimensions": 0},
        {"dimensions": 9},
        {"truncate": "no"},
        {"options": {"seed": "x"}},
    ],
    ids=str,
)
def test_what_is_refused(server: Server, fields: dict[str, Any]) -> None:
    refused(server.post(EMBED, {"model": "fake", "input": "a"} | fields), 400)


@pytest.mark.parametrize("path", [EMBED, EMBEDDINGS])
def test_options_without_effect_are_named(server: Server, path: str) -> None:
    body = {"model": "fake", "input": "a", "prompt": "a", "options": {"num_ctx": 10**6}}
    answer = server.post(path, body)
    named = answer.headers["X-Ignored-Parameters"].split(", ")
    assert "options.num_ctx" in named
    assert ("prompt" if path == EMBED else "input") in named
