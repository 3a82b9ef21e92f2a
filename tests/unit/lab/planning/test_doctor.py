"""``asyncllm doctor``, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncllm.__main__ import main
from asyncllm.executor.memory.profile import StepMemory
from asyncllm.lab.planning import plan as plans
from tests.support.engine.recording import record
from tests.support.models.configs import QWEN3_8B, QWEN3_30B_A3B, QWEN36_27B, config_folder

LOAD = "concurrency=2,input=50,output=20,requests=20"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(config_folder(tmp_path, QWEN3_8B))


@pytest.fixture
def known_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are not run on the meta device, which takes seconds in a process of its own."""
    monkeypatch.setattr(plans, "predicted_step", lambda *_: StepMemory(10**9, 10**8))


def test_the_cache_is_as_large_as_it_was(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # launches would not be recorded
    assert main(["doctor", model, "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [plan] = found["plans"]
    assert plan["kv_tokens"] == pytest.approx(790_608, rel=0.002), "as recorded on an H200"
    assert plan["memory"]["step"] == pytest.approx(1.02 * 2**30, rel=0.03), "as measured"
    assert plan["is_measured"]
    assert plan["decode_seconds"] == pytest.approx(3.88e-3, rel=0.03)
    assert found["errors"] == {}


def test_without_triton_the_step_is_nearly_the_same(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda _: None)
    assert main(["doctor", model, "--gpu", "h200", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    assert plan["memory"]["step"] == pytest.approx(1.02 * 2**30, rel=0.2)


@pytest.mark.usefixtures("known_step")
def test_weights_that_become_fp8(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where kernels take them; all but the two tables of the vocabulary."""
    places = ["--gpu", "h200,a100-80", "--tp", "1,2", "--quantization", "fp8"]
    assert main(["doctor", model, *places, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    found = {(plan["gpu"], plan["tp"]): plan["memory"]["weights"] for plan in plans}
    tables = 2 * 151_936 * 4096 * 2
    assert found["h200", 1] == pytest.approx(tables + 36 * 4096 * (10_240 + 36_864), rel=0.003)
    assert found["h200", 2] == pytest.approx(found["h200", 1] / 2, rel=0.003)
    assert found["a100-80", 1] == pytest.approx(2 * found["h200", 1] - tables, rel=0.003)
    assert main(["doctor", model, "--gpu", "h200", "--quantization", "gptq"]) == 1
    assert "only fp8 can be made of them" in capsys.readouterr().err


@pytest.mark.usefixtures("known_step")
def test_what_fits_where(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--gpu", "h200,l4", "--tp", "1,2,3", "--lengths", "2000"]
    assert main(["doctor", model, *places, "--load", LOAD]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].endswith("2 x l4 (tp 2)")
    assert "sequences of 2,000 at once" in printed.out
    assert "tokens/s of 8 at once (limit)" in printed.out
    assert f"{LOAD}, 20 requests, times in ms:" in printed.out
    for words in ("1 x h200: Step times are measured", "tp > 1", "on NVIDIA L4", "PCIe"):
        assert words in " ".join(printed.out.split())
    assert "3 x h200 (tp 3): --tp 3 does not divide num_attention_heads 32" in printed.err


@pytest.mark.usefixtures("known_step")
def test_limits_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The more sequences, the more of the experts a step reads."""
    model = str(config_folder(tmp_path, QWEN3_30B_A3B))
    assert main(["doctor", model, "--gpu", "h200", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    limits = {rate["rows"]: rate["limit"] for rate in plan["decode_rates"]}
    known = {1: 690, 8: 1290, 32: 2430, 64: 4150, 256: 12700}
    assert limits == pytest.approx(known, rel=0.02)
    assert all(rate["estimated"] < rate["limit"] for rate in plan["decode_rates"])


@pytest.mark.usefixtures("known_step")
def test_recurrent_states_take_memory_and_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(config_folder(tmp_path, QWEN36_27B))
    assert main(["doctor", model, "--gpu", "h200", "--tp", "1,2", "--max-num-seqs", "64"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "recurrent states 253 320" in printed, "half of the memory, or five for a sequence"
    assert "MiB of a state 147.8 73.9" in printed
    assert main(["doctor", model, "--gpu", "h200", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    limits = {rate["rows"]: rate["limit"] for rate in plan["decode_rates"]}
    # Reading the weights, and reading and writing 64 states.
    seconds = 51.3e9 / 4.28e12 + 64 * 2 * plan["state_bytes"] / 4.28e12
    assert limits[64] == pytest.approx(64 / seconds, rel=0.06)


@pytest.mark.usefixtures("known_step")
def test_what_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*options: str) -> str:
        assert main(["doctor", model, "--gpu", "l4", *options]) == 1
        return capsys.readouterr().err

    assert "no sequence fits (--gpu-memory-utilization 0.7 of 22.03 GiB" in error(
        "--gpu-memory-utilization", "0.7"
    )
    assert "--max-model-len 40000 needs a KV cache of as many tokens" in error(
        "--max-model-len", "40000"
    )
    assert "--tp 3 does not divide" in error("--tp", "3")


@pytest.mark.usefixtures("known_step")
def test_a_recorded_load(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.trace"
    record(path, 3)
    assert main(["doctor", model, "--gpu", "h200", "--load", str(path), "--json"]) == 0
    [prediction] = json.loads(capsys.readouterr().out)["plans"][0]["predictions"]
    assert prediction["requests"] > 10
    assert prediction["ttft_p50"] > 0.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h20x"], "no GPU 'h20x'; did you mean h20?"),
        (["--gpu", "h200", "--load", "rate=1"], "input is missing"),
        (["--gpu", "h200", "--tp", "0"], "0 is not positive"),
        (["--gpu", "h200", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
    ],
)
def test_wrong_usage(
    options: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", model, *options])
    assert message in capsys.readouterr().err
