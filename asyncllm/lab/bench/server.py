"""The server that is measured: one in a process of its own, or one that runs already."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn, Self
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from asyncllm.config import EngineConfig
from asyncllm.engine.stats import StepFigures
from asyncllm.errors import AsyncLLMError, BadRequest, NotFound
from asyncllm.llm.client.answers import ModelList, decode, decode_error
from asyncllm.llm.client.request_fields import changed_fields
from asyncllm.server.metrics.server import KEPT_SECONDS

#: Seconds for an answer without tokens.
TIMEOUT: Final = 10.0
#: Requests are over when the server is stopped, so it should end at once.
END_SECONDS: Final = 20.0

#: What the server announces; before the model, it says how many replicas there are.
READY: Final = re.compile(r" is ready on (http://\S+) \(.*model .+, (\w+), \w+, context")


class ServedModel(NamedTuple):
    """``url`` is without /v1; limits that the server does not tell are None."""

    url: str
    name: str
    max_model_len: int | None
    vocab_size: int | None


def find_model(url: str, api_key: str | None = None, name: str | None = None) -> ServedModel:
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
    found = next((model for model in models if name in (None, model.id)), None)
    if found is None:
        raise NotFound(f"{url} does not serve {name or 'any model'}")
    return ServedModel(url, found.id, found.max_model_len, found.vocab_size)


def fetch(url: str, api_key: str | None = None) -> bytes:
    """GET without a proxy, as the load is sent. Raises HTTPError, URLError, TimeoutError."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url, headers=headers), timeout=TIMEOUT) as response:
        body: bytes = response.read()
    return body


class ServerProcess:
    """``asyncllm serve`` on a free port of this machine; its log goes to our stderr.

    It ends with the context, also when a SIGTERM ends this program. For the main thread, where
    signals arrive.

    Attributes:
        url: where it serves.
        device: where the model runs, "cuda" or "cpu".
        start_s: seconds from starting the process to serving.
    """

    def __init__(self, config: EngineConfig):
        self.url = self.device = ""
        self.start_s = 0.0
        self._command = [
            *(sys.executable, "-m", "asyncllm", "serve", "--host", "127.0.0.1", "--port", "0"),
            "--no-standby",  # it would import beside the first requests
            *options(config),
        ]

    def __enter__(self) -> Self:
        """Return when it serves.

        Raises:
            AsyncLLMError: it ended before; its log has the reason.
        """
        self._handler = signal.signal(signal.SIGTERM, _exit)
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        try:
            self.url, self.device = self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait_until_ready(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := READY.search(line):
                return ready[1], ready[2]
        raise AsyncLLMError(
            f"the server ended with status {self._process.wait()} before it was ready"
        )

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
                break
        assert self._process.stdout is not None
        self._process.stdout.close()
        signal.signal(signal.SIGTERM, self._handler)


def _exit(number: int, _frame: object) -> NoReturn:
    """Exit through all open contexts."""
    sys.exit(128 + number)


def options(config: EngineConfig) -> list[str]:
    """The command line of ``asyncllm serve`` for a configuration."""
    return [
        _option(name.replace("_", "-"), value) for name, value in changed_fields(config).items()
    ]


def _option(name: str, value: Any) -> str:
    if name == "model":
        return str(value)
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


Samples = dict[str, float]

_BUSY = "asyncllm_device_busy_seconds_total"
_STEPS = "asyncllm_steps_total"
_LOOP = "asyncllm_event_loop_cpu_seconds_total"
_GAP = "asyncllm_launch_gap_seconds"
_LAG = "asyncllm_result_lag_seconds"


def scrape(url: str, api_key: str | None = None) -> Samples:
    """The metrics of a server as of now; nothing if it has none of ours."""
    time.sleep(KEPT_SECONDS)  # it may have made a text a moment ago
    try:
        body = fetch(f"{url}/metrics", api_key)
    except OSError:  # URLError is one
        return {}
    samples = parse(body.decode(errors="replace"))
    return samples if _STEPS in samples else {}


def parse(text: str) -> Samples:
    """Samples of Prometheus' text format, by name with labels."""
    samples: Samples = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            try:
                samples[name] = float(value)
            except ValueError:
                continue
    return samples


def figures(before: Samples, after: Samples, seconds: float) -> StepFigures:
    """The differences; percentiles are interpolated within the buckets of histograms."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def drafts(name: str) -> int:
        kinds = {key for key in after if key.startswith(f"asyncllm_{name}_total{{")}
        return int(sum(map(grown, kinds)))

    steps = int(grown(_STEPS))

    def each(name: str) -> float:
        return 1e6 * grown(f"asyncllm_{name}_seconds_total") / max(steps, 1)

    gaps = grown(f"{_GAP}_count")
    gap_p99, lag_p99, lag_max = (
        quantile(before, after, name, q) for name, q in ((_GAP, 0.99), (_LAG, 0.99), (_LAG, 1.0))
    )
    return StepFigures(
        seconds=seconds,
        steps=steps,
        busy_share=grown(_BUSY) / seconds,
        launch_gap_us=None
        if gap_p99 is None
        else (1e6 * grown(f"{_GAP}_sum") / gaps, 1e6 * gap_p99),
        result_lag_ms=None
        if lag_p99 is None or lag_max is None
        else (1e3 * lag_p99, 1e3 * lag_max),
        plan_us=each("plan"),
        apply_us=each("apply"),
        deliver_us=each("deliver"),
        launch_us=each("launch"),
        collect_us=each("collect"),
        loop_share=grown(_LOOP) / seconds if _LOOP in after else None,
        drafts=drafts("drafts"),
        drafted=drafts("drafted_tokens"),
        drafted_right=drafts("drafted_tokens_right"),
    )


def quantile(before: Samples, after: Samples, name: str, q: float) -> float | None:
    """Of the values that a histogram observed in between; None if there are none."""
    prefix = f'{name}_bucket{{le="'
    limits = sorted(
        (float(key.removeprefix(prefix).removesuffix('"}')), value - before.get(key, 0.0))
        for key, value in after.items()
        if key.startswith(prefix)
    )
    total = limits[-1][1] if limits else 0.0
    if total <= 0.0:
        return None
    low, below = 0.0, 0.0
    for limit, count in limits:
        if count >= q * total and limit != float("inf"):
            return low + (limit - low) * (q * total - below) / (count - below)
        if limit != float("inf"):
            low, below = limit, count
    return low
