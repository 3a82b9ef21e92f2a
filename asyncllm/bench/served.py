"""What a server says of the model it serves."""

from __future__ import annotations

from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from asyncllm.client.answers import ModelList, decode, decode_error
from asyncllm.errors import BadRequest, NotFound

#: Seconds for an answer without tokens.
TIMEOUT = 10.0


class Served(NamedTuple):
    """``url`` is without /v1; what the server does not say of the model is None."""

    url: str
    model: str
    max_model_len: int | None
    vocab_size: int | None


def ask(url: str, api_key: str | None = None, model: str | None = None) -> Served:
    """The model of that name, or the first one, at ``url`` (with or without /v1).

    Raises:
        BadRequest: ``url`` is no HTTP URL.
        NotFound: the model is not served there.
        AsyncLLMError: the server answers with an error.
        ConnectionError: it cannot be reached.
    """
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} does not start with http://")
    url = url.rstrip("/").removesuffix("/v1")
    try:
        models = decode(fetch(f"{url}/v1/models", api_key), ModelList).data
    except HTTPError as error:
        raise decode_error(error.code, dict(error.headers), error.read()) from None
    except (URLError, TimeoutError) as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from None
    named = [entry for entry in models if model in (None, entry.id)]
    if not named:
        raise NotFound(f"{url} does not serve {model or 'any model'}")
    found = named[0]
    return Served(url, found.id, found.max_model_len, found.vocab_size)


def fetch(url: str, api_key: str | None = None) -> bytes:
    """The body of what is at ``url``, asked for directly, as the load is: without a proxy.

    Raises:
        HTTPError, URLError, TimeoutError: there is none.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers=headers), timeout=TIMEOUT) as response:
        body: bytes = response.read()
    return body
