"""Whose request it is, by the key that it has."""

from __future__ import annotations

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.limits import api_keys
from tests.support.server.serving import serving


def test_a_key_is_hashed_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    digest = api_keys._digest

    def counted(key: bytes) -> bytes:
        hashed.append(key)
        return digest(key)

    config = ServerConfig(api_key=("one", "two"), log_requests=True)
    with serving(config=config) as server:
        monkeypatch.setattr(api_keys, "_digest", counted)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        headers = {"Authorization": "Bearer two"}
        assert server.post("/v1/chat/completions", body, headers).status == 200
        assert hashed == [b"two"]
        assert server.llm.scheduling[-1].tenant == "key-2"
        headers = {"Authorization": "Bearer three"}
        assert server.post("/v1/chat/completions", body, headers).status == 401
        assert hashed == [b"two", b"three"]


def test_a_key_keeps_its_name_and_no_other_key_gets_it() -> None:
    keys = api_keys.ApiKeys(["a", "b"])
    assert keys.tenants == ["key-1", "key-2"]
    keys.replace(["b", "c"])
    assert keys.tenants == ["key-2", "key-3"]
    keys.replace(["a", "c"])
    assert keys.tenants == ["key-1", "key-3"]
