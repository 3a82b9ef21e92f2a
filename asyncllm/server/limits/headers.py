"""Headers that tell clients what is left of their limits, as OpenAI and Anthropic name them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from asyncllm.server.limits.accounts import ACCOUNT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from aiohttp import web
    from aiohttp.typedefs import Handler

    from asyncllm.server.limits.accounts import Account
    from asyncllm.server.limits.bucket import Bucket

#: All that ``openai_headers`` may write.
OPENAI_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


def add_headers(app: web.Application, anthropic: Collection[Handler]) -> None:
    """Have every answer that is charged to an account say what is left.

    Args:
        anthropic: handlers whose clients know Anthropic's names.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        account = request.get(ACCOUNT)
        if account is None:
            return
        if request.match_info.handler in anthropic:
            response.headers.update(anthropic_headers(account, datetime.now(UTC)))
        else:
            response.headers.update(openai_headers(account))

    app.on_response_prepare.append(add)


def openai_headers(account: Account) -> dict[str, str]:
    """``x-ratelimit-remaining-tokens`` and others; a reset is a time until the bucket is full."""
    headers = {}
    for kind, bucket in _buckets(account):
        headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = _remaining(bucket)
        headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_to_full)
    return headers


def anthropic_headers(account: Account, now: datetime) -> dict[str, str]:
    """``anthropic-ratelimit-tokens-remaining`` and others; a reset is a time of day."""
    headers = {}
    for kind, bucket in _buckets(account):
        full_at = now + timedelta(seconds=bucket.seconds_to_full)
        headers[f"anthropic-ratelimit-{kind}-limit"] = str(bucket.limit)
        headers[f"anthropic-ratelimit-{kind}-remaining"] = _remaining(bucket)
        headers[f"anthropic-ratelimit-{kind}-reset"] = full_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes times: 80ms, 1.5s, 2m0s."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{round(rest)}s" if minutes else f"{rest:g}s"


def _buckets(account: Account) -> Iterator[tuple[str, Bucket]]:
    if account.requests is not None:
        yield "requests", account.requests
    if account.tokens is not None:
        yield "tokens", account.tokens


def _remaining(bucket: Bucket) -> str:
    return str(max(0, int(bucket.level)))
