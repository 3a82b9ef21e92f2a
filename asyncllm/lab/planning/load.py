"""``--load``: the requests to predict for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import OnlineCase, Range
from asyncllm.system.suggest import did_you_mean

_Count = Annotated[int, Meta(ge=1)]
_Tokens = Annotated[str, Meta(pattern=r"^[1-9]\d{0,6}(-[1-9]\d{0,6})?$")]
#: What --load knows, and its type.
KEYS: Final[dict[str, Any]] = {
    "rate": Annotated[float, Meta(gt=0, le=1e6)],
    "concurrency": _Count,
    "input": _Tokens,
    "output": _Tokens,
    "prefix": _Count,
    "requests": _Count,
}
#: Requests of a load by default: as many, or these per client or per request a second.
LEAST_REQUESTS: Final = 100
REQUESTS_PER_CLIENT: Final = 4
REQUESTS_PER_RATE: Final = 20


class LoadPlan(msgspec.Struct, frozen=True):
    """A load by its name: requests, or a file with a recorded trace.

    Attributes:
        prefix: tokens that all prompts begin with.
    """

    name: str
    case: OnlineCase | None = None
    prefix: int = 0
    trace: Path | None = None

    @classmethod
    def parse(cls, text: str) -> LoadPlan:
        """Read ``rate=10,input=2000,output=200``, the name of a case, or that of a file.

        Raises:
            BadRequest: the message says what is wrong.
        """
        named = {case.name: case for case in cases.online()}
        if text in named:
            return cls(text, named[text])
        if "=" not in text:
            return cls._of_file(text, list(named))
        given = _given(text)
        rate = given.get("rate")
        if (rate is None) == ("concurrency" not in given):
            raise _wrong(text, "give either rate or concurrency")
        sizes = {key: _range(text, key, given) for key in ("input", "output")}
        num_in, num_out = sizes.values()
        prefix = given.get("prefix", 0)
        if prefix >= num_in[0]:
            raise _wrong(text, f"prefix {prefix} must be less than input {num_in[0]}")
        if rate is not None:
            count = given.get("requests", max(LEAST_REQUESTS, round(REQUESTS_PER_RATE * rate)))
            case = cases.poisson(rate, count, text, num_in=num_in, num_out=num_out)
            return cls(text, case, prefix)
        clients = given["concurrency"]
        count = given.get("requests", max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients))
        return cls(text, cases.closed_loop(clients, count, num_in, num_out, text), prefix)

    @classmethod
    def _of_file(cls, text: str, names: list[str]) -> LoadPlan:
        path = Path(text)
        if not path.is_file():
            raise _wrong(
                text,
                "a load is KEY=VALUE,... as in rate=10,input=2000,output=200, a trace of serve "
                f"--trace, or one of {', '.join(names)}{did_you_mean(text, names)}",
            )
        return cls(text, trace=path)


def _given(text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in KEYS:
            raise _wrong(text, f"unknown key {key!r}{did_you_mean(key, KEYS)}")
        if key in given:
            raise _wrong(text, f"{key} is given twice")
        try:
            given[key] = msgspec.convert(value, KEYS[key], strict=False)
        except msgspec.ValidationError:
            form = "tokens, as in 200 or 100-1024" if KEYS[key] is _Tokens else "a number above 0"
            raise _wrong(text, f"{key} must be {form}, not {value!r}") from None
    return given


def _range(text: str, key: str, given: dict[str, Any]) -> Range:
    if key not in given:
        raise _wrong(text, f"{key} is missing: the tokens of each request, as in {key}=200")
    low, _, high = given[key].partition("-")
    if int(low) > int(high or low):
        raise _wrong(text, f"{key} {given[key]} is the wrong way round")
    return int(low), int(high or low)


def _wrong(text: str, why: str) -> BadRequest:
    return BadRequest(f"{text!r}: {why}", param="load")
