"""What a request says of its scheduling, what it is told of caching, and how it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import DeadlineExceeded
from asyncllm.types import SchedulingParams
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server.serving import Server

USER: Any = {"role": "user", "content": "a"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"prompt": "a"},
}
OPENAI = [path for path in ROUTES if path.startswith("/v1")]


# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_fields_reach_the_engine(server: Server, path: str) -> None:
    fields: dict[str, Any] = {"priority": -10, "cache_salt": "s" * 1024, "deadline_ms": 2500.5}
    fields["cache_ttl_s"] = 3600
    assert server.post(path, ROUTES[path] | fields).status == 200
    assert server.llm.scheduling[-1] == SchedulingParams(**fields)
    nulls = dict.fromkeys([*fields, "trace"])
    assert server.post(path, ROUTES[path] | nulls).status == 200
    assert server.llm.scheduling[-1] == SchedulingParams()


def test_all_sequences_of_a_request_have_the_same(server: Server) -> None:
    before = len(server.llm.scheduling)
    server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "priority": 3})
    assert server.llm.scheduling[before:] == [SchedulingParams(priority=3)] * 4


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 11},
        {"priority": -11},
        {"priority": 0.5},
        {"priority": 2**40},
        {"priority": "high"},
        {"cache_salt": ""},
        {"cache_salt": "s" * 1025},
        {"cache_salt": 1},
        {"deadline_ms": 0},
        {"deadline_ms": -1},
        {"deadline_ms": 1e9},
        {"deadline_ms": "soon"},
        {"cache_ttl_s": -1},
        {"cache_ttl_s": 3600.5},
        {"cache_ttl_s": 1e9},
        {"cache_ttl_s": "5m"},
        {"trace": "yes"},
    ],
    ids=str,
)
def test_bad_values_are_named(server: Server, path: str, fields: dict[str, Any]) -> None:
    before = len(server.llm.scheduling)
    answer = server.post(path, ROUTES[path] | fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] == next(iter(fields))
    assert len(server.llm.scheduling) == before


def test_responses_take_the_time_to_pin_a_prefix_as_well(server: Server) -> None:
    answer = server.post("/v1/responses", {"input": "a", "cache_ttl_s": 30, "store": False})
    assert answer.status == 200
    assert server.llm.scheduling[-1].cache_ttl_s == 30


def test_the_error_tells_the_longest_time_to_pin_a_prefix(server: Server) -> None:
    error = server.post("/generate", {"prompt": "a", "cache_ttl_s": 3601}).json["error"]
    assert error["message"] == "cache_ttl_s must be at most 3600, the limit here (max_cache_ttl_s)"


def test_a_key_makes_a_tenant() -> None:
    config = ServerConfig(api_key=("secret-a", "secret-b", "secret-a"))
    with serving(config=config) as server:
        for key, tenant in (("secret-a", "key-1"), ("secret-b", "key-2")):
            for path, body in ROUTES.items():
                # What a client says of its tenant counts for nothing.
                claim = {"tenant": "key-9", "user": "key-9"}
                headers = {"Authorization": f"Bearer {key}"}
                assert server.post(path, body | claim, headers).status == 200
                assert server.llm.scheduling[-1].tenant == tenant
    with serving() as server:
        server.post("/generate", {"prompt": "a"}, {"Authorization": "Bearer any"})
        assert server.llm.scheduling[-1].tenant == ""


# -- what comes back -------------------------------------------------------------------------------


@pytest.fixture
def cached(server: Server) -> Iterator[int]:
    """Two tokens of every prompt are cached."""
    server.call(lambda: setattr(server.llm, "cached", 2))
    yield 2
    server.call(lambda: setattr(server.llm, "cached", 0))


def usage_of(server: Server, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    if stream:
        options = {"stream_options": {"include_usage": True}} if path in OPENAI else {}
        last = server.post(path, body | options | {"stream": True}).frames[-1]
    else:
        last = server.post(path, body).json
    usage: dict[str, Any] = last["usage"]
    return usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_cached_tokens_are_in_the_usage(
    server: Server, cached: int, path: str, stream: bool
) -> None:
    body = {"messages": [USER]} if "chat" in path else {"prompt": "abcd"}
    usage = usage_of(server, path, body, stream=stream)
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_counts_once(server: Server, cached: int, stream: bool) -> None:
    body = {"prompt": ["abcd", "efgh", "ijkl"], "n": 2, "add_special_tokens": False}
    usage = usage_of(server, "/v1/completions", body, stream=stream)
    assert usage["prompt_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3 * cached}


def test_never_more_is_cached_than_was_asked(server: Server, cached: int) -> None:
    usage = usage_of(server, "/v1/completions", {"prompt": [97]}, stream=False)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_usage_in_every_frame_ends_with_what_was_cached(server: Server, cached: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abcd", "stream": True, "stream_options": options}
    frames = server.post("/v1/completions", body).frames
    counts = [frame["usage"]["prompt_tokens_details"]["cached_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[-1] == cached


def test_the_official_client_reads_it(server: Server, cached: int) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="fake", messages=[USER], extra_body={"priority": 1, "trace": True}
        )
        text = client.completions.create(model="fake", prompt="abcd")
        *_, last = client.chat.completions.create(
            model="fake", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
    for usage in (chat.usage, text.usage, last.usage):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


# -- refusals --------------------------------------------------------------------------------------


@pytest.fixture
def full() -> Iterator[Server]:
    """Every place in the queue is taken."""
    with serving() as server:
        server.call(server.llm.hold)
        clients = [server.open("/generate", {"prompt": "a"}) for _ in range(16)]
        server.until(lambda: server.llm.stats.waiting == 16)
        yield server
        for client in clients:
            client.close()


@pytest.mark.parametrize("path", ROUTES)
def test_a_full_queue_costs_no_tokenizing(full: Server, path: str) -> None:
    llm = full.llm
    assert llm.chat_template is not None
    texts = list(llm.encoded)
    answer = full.post(path, ROUTES[path] | {"stream": True})
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("3", "2500")
    assert answer.headers["x-should-retry"] == "true"
    # Nor rendering, nor parsing: what was sent is not even looked at.
    assert full.post(path, b"not JSON").status == 429
    assert llm.encoded == texts
    assert not hasattr(llm.chat_template, "seen")


def test_a_full_queue_still_answers_what_needs_no_place(full: Server) -> None:
    for path in ("/v1/models", "/metrics", "/ready", "/health"):
        assert full.get(path).status == 200
    assert full.post("/detokenize", {"tokens": [97]}).json == {"prompt": "a"}


@pytest.fixture
def ten_of_a_hundred() -> Iterator[Server]:
    """Ten prompt tokens are waiting, and there is room for ninety more."""
    with serving() as server:
        llm = server.llm
        limits = msgspec.structs.replace(llm.limits, max_waiting_tokens=100)
        server.call(lambda: setattr(llm, "limits", limits))
        server.call(llm.hold)
        with server.open("/generate", {"prompt": list(range(10))}):
            server.until(lambda: llm.stats.waiting == 1)
            yield server


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a" * 91}),
        ("/v1/completions", {"prompt": "é" * 46}),
        ("/v1/completions", {"prompt": ["a" * 46, "b" * 45]}),
        ("/v1/completions", {"prompt": "a" * 31, "n": 3}),
        ("/v1/completions", {"prompt": [97] * 91}),
        ("/v1/completions", {"prompt": [[97] * 46, [98] * 45]}),
        ("/generate", {"prompt": "a" * 91}),
        ("/generate", {"prompt": [97] * 91}),
    ],
    ids=str,
)
def test_lengths_tell_that_prompts_cannot_wait(
    ten_of_a_hundred: Server, path: str, fields: dict[str, Any]
) -> None:
    """All sequences of a request together, before one text is tokenized."""
    answer = ten_of_a_hundred.post(path, fields)
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert ten_of_a_hundred.llm.encoded == []
    assert ten_of_a_hundred.call(lambda: ten_of_a_hundred.llm.stats.waiting) == 1


@pytest.mark.parametrize(
    "fields", [{"prompt": "a" * 90}, {"prompt": ["a" * 45] * 2}, {"prompt": "a" * 30, "n": 3}]
)
def test_what_fits_exactly_may_wait(ten_of_a_hundred: Server, fields: dict[str, Any]) -> None:
    llm = ten_of_a_hundred.llm
    body = fields | {"add_special_tokens": False}
    with ten_of_a_hundred.open("/v1/completions", body):
        ten_of_a_hundred.until(lambda: sum(len(s.prompt_ids) for s in llm._waiting.values()) == 100)


@pytest.mark.parametrize("prompt", ["a" * 5000, [97] * 5000])
def test_what_can_never_fit_is_told_so_all_the_same(ten_of_a_hundred: Server, prompt: Any) -> None:
    answer = ten_of_a_hundred.post("/v1/completions", {"prompt": prompt})
    assert answer.json["error"]["code"] == "context_length_exceeded"


# -- deadlines -------------------------------------------------------------------------------------


@pytest.fixture
def late(server: Server) -> Iterator[None]:
    server.call(lambda: setattr(server.llm, "fail", DeadlineExceeded("too late")))
    yield
    server.call(lambda: setattr(server.llm, "fail", None))


@pytest.mark.parametrize("path", ROUTES)
def test_a_deadline_that_passes(server: Server, late: None, path: str) -> None:
    answer = server.post(path, ROUTES[path] | {"deadline_ms": 1000})
    assert answer.status == 408
    expected = {
        "message": "too late",
        "type": "timeout_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert answer.json == {"error": expected}
    assert answer.headers["x-should-retry"] == "false"
    assert "Retry-After" not in answer.headers
    streamed = server.post(path, ROUTES[path] | {"deadline_ms": 1000, "stream": True})
    assert streamed.status == 200
    assert streamed.frames[-1] == {"error": expected}


def test_the_official_client_does_not_repeat_what_is_too_late(server: Server, late: None) -> None:
    before = len(server.llm.scheduling)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=2) as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.completions.create(model="fake", prompt="a", extra_body={"deadline_ms": 5})
    assert caught.value.status_code == 408
    assert len(server.llm.scheduling) == before + 1
