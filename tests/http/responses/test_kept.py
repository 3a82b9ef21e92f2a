"""Responses that are kept: conversations that go on, background, and what memory they may take."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import StepError
from asyncllm.server.responses.input import decode_item
from asyncllm.server.responses.schemas import ReasoningItem
from asyncllm.server.responses.store import ResponseStore, StoredResponse, stored_items
from tests.http.responses.test_responses import RESPONSES, make_llm, seen
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving


def texts(server: Server) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in seen(server)[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(client: openai.OpenAI, server: Server, stream: bool) -> None:
    def ask(text: str, **fields: Any) -> Any:
        made: Any = client.responses.create(model="fake", input=text, stream=stream, **fields)
        return [*made][-1].response if stream else made

    first = ask("one", instructions="only once")
    second = ask("two", previous_response_id=first.id)
    third = ask("three", previous_response_id=second.id)
    said = [("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two")]
    assert texts(server) == [*said, ("user", "three")]
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()
    items: Any = client.responses.input_items.list(third.id, order="asc")
    assert [item.content[0].text for item in items] == [*(text for _, text in said), "three"]
    # Another branch of the same conversation.
    ask("other", previous_response_id=first.id)
    assert texts(server) == [*said[:2], ("user", "other")]


def test_pages_of_input_items(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": str(i)} for i in range(7)]
    made = client.responses.create(model="fake", input=given)
    first: Any = client.responses.input_items.list(made.id, limit=3)
    assert (len(first.data), first.has_more) == (3, True)
    whole = [item.content[0].text for item in first]
    assert whole == ["6", "5", "4", "3", "2", "1", "0"]
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(made.id, after="msg_0")
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(made.id, limit=0)


def test_items_may_be_referred_to(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model="fake", input="one")
    items: Any = [{"type": "item_reference", "id": first.output[0].id}]
    client.responses.create(model="fake", input=[*items, {"role": "user", "content": "two"}])
    assert texts(server) == [("assistant", "one"), ("user", "two")]


def test_what_is_not_stored_or_deleted_is_gone(client: openai.OpenAI) -> None:
    unstored = client.responses.create(model="fake", input="a", store=False)
    deleted = client.responses.create(model="fake", input="a")
    following = client.responses.create(model="fake", input="b", previous_response_id=deleted.id)
    client.responses.delete(deleted.id)
    for id in (unstored.id, deleted.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(id)
    for id in (deleted.id, following.id):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="fake", input="c", previous_response_id=id)


def test_tenants_see_their_own() -> None:
    with serving(make_llm, ServerConfig(api_key=("a", "b"))) as guarded:
        mine, yours = ({"Authorization": f"Bearer {key}"} for key in "ab")
        made = guarded.post(RESPONSES, {"input": "x"}, mine).json
        path = f"{RESPONSES}/{made['id']}"
        assert guarded.get(path, mine).status == 200
        for answer in (
            guarded.get(path, yours),
            guarded.get(f"{path}/input_items", yours),
            guarded.request("DELETE", path, headers=yours),
            guarded.post(f"{path}/cancel", b"", yours),
        ):
            assert answer.status == 404
        reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
        for fields in ({"previous_response_id": made["id"]}, {"input": reference}):
            assert guarded.post(RESPONSES, {"input": "x"} | fields, yours).status == 400


def until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_background(client: openai.OpenAI, server: Server) -> None:
    server.call(server.llm.hold)
    made = client.responses.create(model="fake", input="abc", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert client.responses.retrieve(made.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="has not ended yet"):
        client.responses.create(model="fake", input="a", previous_response_id=made.id)
    server.call(server.llm.resume)
    until(lambda: client.responses.retrieve(made.id).status == "completed")
    whole = client.responses.retrieve(made.id)
    assert whole.output_text == "abc"
    assert client.responses.cancel(made.id).status == "completed"


def test_cancelling(client: openai.OpenAI, server: Server) -> None:
    server.call(server.llm.hold)
    made = client.responses.create(model="fake", input="abc", background=True)
    until(lambda: server.call(lambda: server.llm.stats.waiting) == 1)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    server.until_idle()
    server.call(server.llm.resume)
    foreground = client.responses.create(model="fake", input="abc")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(foreground.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_0")


def test_deleting_what_runs(client: openai.OpenAI, server: Server) -> None:
    server.call(server.llm.hold)
    made = client.responses.create(model="fake", input="abc", background=True)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    server.until_idle()
    server.call(server.llm.resume)


def test_failing_in_the_background(
    client: openai.OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm, "fail", StepError("planted"))
    made = client.responses.create(model="fake", input="abc", background=True)
    until(lambda: client.responses.retrieve(made.id).status == "failed")
    error = client.responses.retrieve(made.id).error
    assert error is not None
    assert error.message == "planted"


def test_streams_of_the_background(client: openai.OpenAI, server: Server) -> None:
    """One that is cut off goes on where it was; and the response does not mind."""
    server.call(server.llm.hold)
    events: Any = client.responses.create(model="fake", input="abc", background=True, stream=True)
    created, queued = next(events), next(events)
    events.close()
    assert (created.type, queued.type) == ("response.created", "response.queued")
    server.call(server.llm.resume)
    id = created.response.id
    rest = [*client.responses.retrieve(id, stream=True, starting_after=queued.sequence_number)]
    assert [event.sequence_number for event in rest] == list(range(2, 2 + len(rest)))
    assert (
        "".join(event.delta for event in rest if event.type == "response.output_text.delta")
        == "abc"
    )
    assert (rest[0].type, rest[-1].type) == ("response.in_progress", "response.completed")
    again = [*client.responses.retrieve(id, stream=True)]
    assert [event.type for event in again][2:] == [event.type for event in rest]
    foreground = client.responses.create(model="fake", input="a")
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(foreground.id, stream=True)


def test_a_full_queue_refuses_the_background(server: Server) -> None:
    server.call(server.llm.hold)
    most = server.llm.limits.max_waiting
    made = [server.post(RESPONSES, {"input": "a", "background": True}) for _ in range(most + 1)]
    server.call(server.llm.resume)
    assert [answer.status for answer in made] == [200] * most + [429]
    assert made[-1].headers["Retry-After"]
    server.until_idle()


def test_the_background_ends_with_the_server() -> None:
    with serving(lambda: FakeLLM(step_seconds=0.05)) as stopping:
        stopping.post(RESPONSES, {"input": "a" * 1000, "background": True})
        stopping.until(lambda: stopping.llm.stats.running == 1)
    assert stopping.llm.aborted == [1]


def item(id: str) -> ReasoningItem:
    return ReasoningItem(id=id, summary=[])


def stored(id: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    body = json.dumps({"output": [{"id": f"out_{id}"}]}).encode() + b" " * size
    given, made = (stored_items([item(f"{side}_{id}")]) for side in ("in", "out"))
    return StoredResponse(body, given, made, previous, False, None)


def test_the_store_forgets_what_was_not_used_for_longest() -> None:
    store = ResponseStore(most=3)
    for id in "abc":
        store.add("t", id, stored(id))
    assert store.get("t", "a") is not None
    store.add("t", "d", stored("d"))
    assert [id for id in "abcd" if store.get("t", id)] == ["a", "c", "d"]
    found = store.find_items("t", ["out_b", "in_c"])
    assert {id: decode_item(each.json) for id, each in found.items()} == {"in_c": item("in_c")}
    assert store.find_items("other", ["in_c"]) == {}


def test_using_items_of_many_responses_keeps_what_they_continue() -> None:
    store = ResponseStore(most=5)
    for id, previous in (("a", None), ("b", "a"), ("x", None), ("c", "b"), ("d", "b")):
        store.add("t", id, stored(id, previous))
    store.find_items("t", ["in_c", "out_d", "in_a"])
    store.add("t", "y", stored("y"))
    assert store.get("t", "x") is None, "the only one that was not used"
    store.add("t", "z", stored("z"))
    kept = [id for id in "abcd" if id in store._tenants["t"].responses]
    assert kept in (["a", "b", "c"], ["a", "b", "d"]), "one that nothing continues went first"


def test_the_store_counts_bytes() -> None:
    store = ResponseStore(most_bytes=1000)
    for id in "abc":
        store.add("t", id, stored(id, size=300))
    assert [id for id in "abc" if store.get("t", id)] == ["b", "c"]
    store.add("other", "d", stored("d", size=900))
    assert [id for id in "abc" if store.get("t", id)] == ["b", "c"]
    store.add("t", "e", stored("e", size=2000))
    assert not any(store.get("t", id) for id in "abce")


def test_a_response_goes_before_those_that_it_continues() -> None:
    store = ResponseStore(most=4)
    store.add("t", "a", stored("a"))
    store.add("t", "b", stored("b", "a"))
    store.add("t", "c", stored("c", "b"))
    store.add("t", "x", stored("x"))
    store.add("t", "d", stored("d", "b"))  # c is the oldest that nothing continues
    assert store.get("t", "c") is None
    history = store.history("t", "d")
    assert history is not None
    assert [item.id for item in history] == ["in_a", "out_a", "in_b", "out_b", "in_d", "out_d"]
    store.remove("t", "a")
    assert store.history("t", "d") is None
    assert store.history("t", "x") is not None


def test_a_forgotten_store_is_empty() -> None:
    store = ResponseStore(most=1)
    for id in "abc":
        store.add("t", id, stored(id, previous=None if id == "a" else "a"))
    assert store.remove("t", "a") is not None
    shelf = store._tenants["t"]
    assert (shelf.size, len(shelf.responses), len(shelf.items)) == (0, 0, 0)


# -- how much a request may refer to ---------------------------------------------------------------


def test_references_are_bounded_like_what_is_sent() -> None:
    with serving(config=ServerConfig(max_body_bytes=20_000)) as server:
        body = {"input": "a" * 1000, "max_output_tokens": 1}
        stored = server.post("/v1/responses", body).json["id"]
        items = server.get(f"/v1/responses/{stored}/input_items").json["data"]
        reference = {"type": "item_reference", "id": items[0]["id"]}
        few = server.post("/v1/responses", {"input": [reference] * 3, "max_output_tokens": 1})
        assert few.status == 200
        assert len(server.get(f"/v1/responses/{few.json['id']}/input_items").json["data"]) == 3
        many = server.post("/v1/responses", {"input": [reference] * 30})
        assert many.json["error"]["param"] == "input"
        assert "the items referred to have more than 20000 bytes" in many.json["error"]["message"]
        unknown = server.post("/v1/responses", {"input": [reference, {"id": "nobody"}]})
        assert unknown.json["error"]["param"] == "input[1].id"


def test_a_conversation_is_bounded_like_what_is_sent() -> None:
    with serving(config=ServerConfig(max_body_bytes=5000)) as server:
        body: dict[str, Any] = {"input": "a" * 2000, "max_output_tokens": 1}
        body["truncation"] = "auto"  # the context has room for two turns
        for _ in range(3):
            answer = server.post("/v1/responses", body)
            assert answer.status == 200
            body["previous_response_id"] = answer.json["id"]
        answer = server.post("/v1/responses", body)
        assert answer.json["error"]["param"] == "previous_response_id"
        assert "more than 8192 items or 5000 bytes" in answer.json["error"]["message"]


def test_logprobs_are_kept_in_the_response_only() -> None:
    with serving() as server:
        body = {"input": "abc", "include": ["message.output_text.logprobs"], "top_logprobs": 3}
        stored = server.post("/v1/responses", body).json
        again = server.get(f"/v1/responses/{stored['id']}").json
        assert len(again["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 3
        more = server.post("/v1/responses", {"input": "d", "previous_response_id": stored["id"]})
        items = server.get(f"/v1/responses/{more.json['id']}/input_items?order=asc").json["data"]
        assert items[1]["content"][0]["text"] == stored["output"][0]["content"][0]["text"]
        assert items[1]["content"][0]["logprobs"] == []
