"""Whose request it is, by the key that it bears."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from asyncllm.errors import Unauthorized
from asyncllm.server.http import api_keys
from asyncllm.server.http.api_keys import ApiKeys


def test_a_request_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(["one", "two"])
    hashed: list[bytes] = []
    digest = api_keys._digest

    def counted(key: bytes) -> bytes:
        hashed.append(key)
        return digest(key)

    monkeypatch.setattr(api_keys, "_digest", counted)
    request = make_mocked_request("POST", "/", headers={"Authorization": "Bearer two"})
    assert [keys.tenant_of(request) for _ in range(4)] == ["key-2"] * 4
    assert hashed == [b"two"]


def test_a_wrong_key_is_refused_each_time() -> None:
    keys = ApiKeys(["one"])
    request = make_mocked_request("POST", "/", headers={"Authorization": "Bearer other"})
    for _ in range(2):
        with pytest.raises(Unauthorized):
            keys.tenant_of(request)
