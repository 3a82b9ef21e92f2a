"""What /v1/responses refuses, and how it fails."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from asyncllm.errors import StepError
from tests.http.responses.test_responses import RESPONSES, TOOLS
from tests.support.server.fake_llm import MAX_LEN
from tests.support.server.serving import Server


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": 1}, {"role": "user", "content": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        (
            {"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_LEN}, "max_output_tokens"),
        pytest.param({"input": "a" * MAX_LEN}, "input", id="a long input"),
        ({"temperature": -1}, "temperature"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
    ids=str,
)
def test_refusals(server: Server, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = server.post(RESPONSES, {"input": "a", "stream": stream} | fields)
        assert answer.status == 400, answer.body
        error = answer.json["error"]
        assert error["param"].startswith(param), error
        assert error["type"] == "invalid_request_error"


def test_a_missing_response_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="a", previous_response_id="resp_0")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="a")
    assert caught.value.code == "model_not_found"


def test_failing(server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "fail", StepError("planted"))
    with pytest.raises(openai.InternalServerError, match="planted"):
        client.responses.create(model="fake", input="a")
    *_, last = client.responses.create(model="fake", input="a", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "planted")
    assert client.responses.retrieve(last.response.id).status == "failed"
