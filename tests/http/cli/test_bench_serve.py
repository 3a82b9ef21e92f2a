"""``asyncllm bench serve``: real servers in processes of their own, real load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError
from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import OnlineCase, closed_loop, interference, poisson
from asyncllm.lab.bench.load import Answered, Outcome, Target
from asyncllm.lab.bench.online import Load, deal, run_cases, summarize
from asyncllm.lab.bench.report import Report, decode_report
from asyncllm.lab.bench.server import READY, options
from asyncllm.lab.bench.server import ServerProcess as BenchServer
from tests.support.server.serving import ServerProcess

VOCAB = 2368  # of the demo, whose text a simulated device has
SIM = ("--device", "sim", "--sim-profile", "h200-0.6b")


def tiny(seed: int = 0) -> tuple[OnlineCase, ...]:
    return (
        closed_loop(1, 2, (8, 8), (16, 16), seed=seed),
        closed_loop(6, 20, (5, 50), (5, 20), seed=seed),
        poisson(100, 10, seed=seed),
        interference(3, 2, 0.05, seed=seed),
    )


def tiny_sweep(
    clients: list[int],
    rates: list[float],
    seed: int = 0,
    num_in: cases.Range = cases.PROMPT_TOKENS,
    num_out: cases.Range = cases.OUTPUT_TOKENS,
    count: int | None = None,
) -> tuple[OnlineCase, ...]:
    if num_in == cases.PROMPT_TOKENS:
        num_in = num_out = (5, 9)
    return (
        *(closed_loop(n, count or 4, num_in, num_out, f"{n} clients", seed) for n in clients),
        *(poisson(rate, count or 4, f"{rate:g}/s", seed, num_in, num_out) for rate in rates),
    )


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "online", tiny)
    monkeypatch.setattr(cases, "sweep", tiny_sweep)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess(*SIM, "--api-key", "secret")
    yield running
    assert running.stop() == 0


def read(path: Path) -> Report:
    return decode_report(path.read_bytes(), path)


def children(of: int | None = None) -> list[str]:
    """Child processes, ours by default, but for the one that multiprocessing keeps for itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            args = (folder / "cmdline").read_text()  # nothing, once it has ended
            if parent == (of or os.getpid()) and args and "resource_tracker" not in args:
                found.append(f"{folder.name} {args}")
    return sorted(found)


# -- a server of our own ---------------------------------------------------------------------------


def test_all_cases_against_a_server_that_is_started_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children()
    out, old = tmp_path / "out.json", tmp_path / "old.json"
    assert main(["bench", "serve", *SIM, "--json", str(out)]) == 0
    assert children() == before, "the server and the clients have ended"
    report = read(out)
    assert report.model == "asyncllm-demo"
    assert report.settings == {"device": "sim", "sim_profile": "h200-0.6b"}
    assert report.start_s is not None
    rows = {row.case: row for row in report.online}
    assert list(rows) == ["c1", "c6", "poisson100", "interfere3"]
    for row in report.online:
        assert row.failed == 0
        assert row.ttft_p50 is not None
        assert row.itl_p99 is not None
        assert row.itl_p50 is not None
        # On a busy machine, most events may arrive together with others.
        assert 0 <= row.itl_p50 <= row.itl_p99 <= (row.itl_max or 0)
        assert row.itl_max
        assert row.engine is not None
        assert row.engine.steps > 5
        assert 0 < row.engine.busy_share < 1.2
        assert row.engine.loop_share is not None
        assert 0 < row.engine.loop_share < 1.2
    assert rows["c1"].requests == 2
    c6 = next(case for case in tiny() if case.name == "c6")
    assert rows["c6"].tok_s * rows["c6"].seconds == pytest.approx(sum(s[2] for s in c6.shots))
    assert (rows["poisson100"].rate, rows["poisson100"].clients) == (100, None)
    assert rows["interfere3"].requests == 5
    assert rows["interfere3"].long_ttft_p50 is not None
    assert rows["interfere3"].tok_s * rows["interfere3"].seconds == pytest.approx(3000)
    printed = capsys.readouterr()
    assert "long prompts" in printed.out
    assert "busy" in printed.out
    assert "c6: " in printed.err

    out.rename(old)
    args = ["bench", "serve", *SIM, "--cases", "c6", "--json", str(out), "--compare", str(old)]
    assert main(args) == 0
    assert [row.case for row in read(out).online] == ["c6"]
    printed = capsys.readouterr()
    assert "ratios above 1 are better" in printed.out
    assert "itl_p99" in printed.out


def test_a_server_that_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = children()
    assert main(["bench", "serve", str(tmp_path / "nothing"), "--device", "cpu"]) == 1
    assert children() == before
    printed = capfd.readouterr().err
    assert "cannot load the model" in printed
    assert "the server ended with status 1 before it was ready" in printed


def test_the_server_ends_with_its_context() -> None:
    before = children()
    server = BenchServer(EngineConfig(device="sim"))
    with suppress(KeyboardInterrupt), server:
        assert len(children()) == len(before) + 1
        raise KeyboardInterrupt
    assert server.url.startswith("http://127.0.0.1:")
    assert server.device == "sim"
    assert children() == before


def test_a_benchmark_that_is_terminated_ends_its_server(tmp_path: Path) -> None:
    before = children()
    command = [sys.executable, "-m", "asyncllm", "bench", "serve", *SIM, "--cases", "c1"]
    out = tmp_path / "out.json"
    process = subprocess.Popen([*command, "--json", str(out)])
    while not running_servers(process.pid):
        time.sleep(0.05)
    time.sleep(1.0)
    [server] = running_servers(process.pid)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()
    assert children() == before


def running_servers(parent: int) -> list[str]:
    return [child.split()[0] for child in children(parent) if "\0serve\0--host" in child]


def test_the_server_gets_the_given_options() -> None:
    config = EngineConfig(
        model="some/model", load_format="dummy", max_num_seqs=8, prefix_caching=False
    )
    assert options(config) == [
        *("some/model", "--load-format=dummy", "--max-num-seqs=8", "--no-prefix-caching")
    ]
    assert options(EngineConfig()) == []
    given = options(EngineConfig(hf_overrides={"a": None, "b": "c"}))
    assert given == ['--hf-overrides={"a": null, "b": "c"}']


def test_what_a_server_announces_is_read() -> None:
    """With one replica or several."""
    about = "model a, b, sim, bfloat16, context 40960, KV cache 791008 tokens"
    for text in (about, f"2 replicas, each with {about}"):
        found = READY.search(f"asyncllm is ready on http://127.0.0.1:3 ({text})")
        assert found is not None
        assert found.groups() == ("http://127.0.0.1:3", "sim")


# -- a server elsewhere ----------------------------------------------------------------------------


def test_a_sweep_at_a_url(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["bench", "serve", "--url", f"{server.url}/v1", "--api-key", "secret"]
    args += ["--json", str(out)]
    assert main([*args, "--clients", "1,2", "--rates", "50"]) == 0
    report = read(out)
    assert [row.case for row in report.online] == ["1 clients", "2 clients", "50/s"]
    assert report.start_s is None
    assert server.url in report.machine
    assert report.online[0].engine is not None, "the key is used for /metrics too"
    assert server.process.poll() is None
    # The server says how large its vocabulary is; these prompts are beyond it.
    args = ["bench", "serve", "--url", server.url, "--api-key", "secret"]
    assert main([*args, "--vocab-size", "10001"]) == 1
    assert "no request was answered; HTTP 400" in capsys.readouterr().err


def test_errors_of_a_url(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*args: str) -> str:
        assert main(["bench", "serve", *args]) == 1
        return capsys.readouterr().err

    assert "API key" in error_of("--url", server.url)
    assert "does not serve other" in error_of("other", "--url", server.url, "--api-key", "secret")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert f"{url}: [Errno 111]" in error_of("--url", url)
    assert "http://" in error_of("--url", "localhost:8000")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--url http://x --device cpu", "--device: the server at --url decides"),
        ("--cases c1 --clients 2", "--cases are not run beside"),
        ("--cases c1,c9", "no case 'c9' among c1, c6, poisson100, interfere3"),
        ("--clients 1,x", "'x' is not a number"),
        ("--clients 0", "0 is not positive"),
        ("--rates inf", "inf is not positive"),
        ("--cases c1 --input-len 5", "--cases have lengths"),
        ("--cases c1 --prompts x.csv", "--prompts are run instead of --cases"),
        ("--column x", "--column is one of the file of --prompts"),
        ("--peer vllm", "--peer is one of those in the file of --compare"),
        ("--max-num-seqs 0", "--max-num-seqs must be at least 1, not 0"),
    ],
)
def test_wrong_usage(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *args.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--compare", "nothing.json"], "nothing.json"),
        (["--compare", "bad.json"], "bad.json is not a JSON object"),
        (["--compare", "peers.json"], "peers.json has figures of Qwen3-8B; not of asyncllm-demo"),
        (["--json", "no/such/folder.json"], "no/such"),
    ],
)
def test_wrong_files_are_refused_before_a_server_starts(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncllm.lab.bench.server.ServerProcess.__enter__", None)
    Path("bad.json").write_text("{")
    row = {"engine": "x", "model": "Qwen3-8B", "case": "c1", "out_tok_s": 1.0}
    Path("peers.json").write_text(json.dumps({"offline": [row]}))
    assert main(["bench", "serve", *args]) == 1
    assert message in capsys.readouterr().err


# -- prompts of one's own --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "extra", "found"),
    [
        ("p.csv", "prompt,arrival\nhello,0\nthere,0.1\n", "", [("prompts", 2, None, None)]),
        ("p.csv", "id,text\n1,hello\n", "--column text", [("8 clients", 1, 8, None)]),
        (
            "p.jsonl",
            '{"messages": [{"role": "user", "content": "hello"}]}\n{"prompt": [5, 6]}\n',
            "--clients 1,2 --rates 50 --num-prompts 2",
            [("1 clients", 2, 1, None), ("2 clients", 2, 2, None), ("50/s", 2, None, 50)],
        ),
    ],
)
def test_a_file_of_prompts(
    server: ServerProcess, tmp_path: Path, name: str, text: str, extra: str, found: object
) -> None:
    path, out = tmp_path / name, tmp_path / "out.json"
    path.write_text(text)
    args = ["bench", "serve", "--url", server.url, "--api-key", "secret", "--prompts", str(path)]
    assert main([*args, *extra.split(), "--output-len", "9", "--json", str(out)]) == 0
    rows = read(out).online
    assert [(row.case, row.requests, row.clients, row.rate) for row in rows] == found
    for row in rows:
        assert row.failed == 0
        assert 1 <= row.tok_s * row.seconds <= 9 * row.requests + 0.1
        assert row.ttft_p50 is not None


def test_given_lengths(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ["bench", "serve", "--url", server.url, "--api-key", "secret", "--input-len", "20"]
    assert main([*args, "--output-len", "6", "--num-prompts", "10", "--json", str(out)]) == 0
    [row] = read(out).online
    assert (row.case, row.requests) == ("8 clients", 10)
    assert row.tok_s * row.seconds == pytest.approx(60)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "prompt,max_tokens\nhi,3\nho,x\n", "line 3: 'max_tokens' is not a number: 'x'"),
        ("p.csv", "prompt,max_tokens\nhi,0\n", "line 2: 'max_tokens' must be a whole number"),
        ("p.csv", "prompt,arrival\nhi,1\nho,\n", "line 3: no arrival, which other prompts have"),
        ("p.csv", "prompt,arrival\nhi,-1\n", "line 2: 'arrival' is not a number: '-1'"),
        ("p.csv", "prompt,x\n,1\n", "line 2: the prompt is empty"),
        ("p.csv", "id,text\n1,hi\n", "no column 'prompt' among id, text; name one with --column"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2: no 'prompt' or 'messages'"),
        ("p.jsonl", '{"prompt": "a"}\n\nb\n', "line 3: JSON is malformed"),
        ("p.xls", "", "must end in .txt, .csv, .jsonl"),
    ],
)
def test_wrong_files_of_prompts(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", str(path)]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert name in printed


# -- load ------------------------------------------------------------------------------------------


def test_several_processes_share_a_case(server: ServerProcess) -> None:
    case = closed_loop(130, 140, (5, 10), (5, 10))
    target = Target(server.url, "asyncllm-demo", VOCAB, "secret")
    jobs = deal(case, target, 3)
    assert [job.clients for job in jobs] == [44, 43, 43]
    assert sorted(shot for job in jobs for shot in job.shots) == sorted(case.shots)
    with Load(target, most_processes=2) as load:
        row = load.run(case)
        again = load.run(case)
    assert (row.requests, row.failed, again.failed) == (140, 0, 0)
    assert row.tok_s * row.seconds == pytest.approx(sum(shot.num_out for shot in case.shots))


def test_tokens_without_an_event_are_reported(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = array("d", [1.0, 1.1, 1.5]).tobytes()
    answers = [Answered(False, 0.5, 12, times), Answered(True, 0.5, 3, times)]
    row = summarize(closed_loop(1, 2, (5, 5), (5, 5)), [Outcome(answers, 0.1)], 0.0)
    assert row.tokens_per_event == 15 / 6
    monkeypatch.setattr("asyncllm.cli.commands.bench.MANY_TOKENS", 0.5)
    out = tmp_path / "out.json"
    args = ["bench", "serve", "--url", server.url, "--api-key", "secret", "--clients", "1"]
    assert main([*args, "--vocab-size", str(VOCAB), "--json", str(out)]) == 0
    found = read(out).online[0].tokens_per_event
    assert found is not None
    assert 1 <= found < 2  # some tokens of the simulated device's text have none of their own
    assert f"1 clients: {found:.2f} tokens per event" in capsys.readouterr().err


def test_some_failures_are_counted(server: ServerProcess) -> None:
    good, bad = closed_loop(2, 3, (5, 5), (5, 5)), closed_loop(2, 2, (5, 5), (10**6, 10**6))
    mixed = OnlineCase("mixed", good.shots + bad.shots, clients=2)
    target = Target(server.url, "asyncllm-demo", VOCAB, "secret")
    with Load(target) as load:
        row = load.run(mixed)
        assert (row.requests, row.failed) == (5, 2)
        assert row.tok_s * row.seconds == pytest.approx(15)
        with pytest.raises(AsyncLLMError, match="no request was answered"):
            load.run(bad)
        assert load.run(good).failed == 0


def test_a_server_that_hangs_up() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        code = f"import socket\nserver = socket.socket(fileno={listener.fileno()})\n"
        code += "while True: server.accept()[0].close()"
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[listener.fileno()])
        try:
            with pytest.raises(AsyncLLMError, match=r"no request was answered; the connection was"):
                list(run_cases(Target(url, "m", VOCAB), [closed_loop(1, 2, (5, 5), (5, 5))]))
        finally:
            process.kill()
            process.wait()
