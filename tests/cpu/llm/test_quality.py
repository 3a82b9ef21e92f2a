"""``asyncllm doctor --quality``: the differences between a quantised model and that in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncllm.__main__ import main
from asyncllm.lab.quality import compare
from asyncllm.types import PromptLogprob
from tests.support.models import quantized, tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests


def _score(logprob: float, likeliest: int) -> PromptLogprob:
    return PromptLogprob(5, logprob, ((likeliest, -0.1),))


def test_differences() -> None:
    expected = [_score(-1.0, 5), _score(-2.0, 6), _score(-3.0, 7), _score(-4.0, 8)]
    found = [_score(-1.5, 5), _score(-1.5, 6), _score(-3.0, 8), _score(-2.0, 8)]
    got = compare(expected, found)
    assert (got.tokens, got.mean, got.same) == (4, 0.75, 0.75)
    assert got.p99 == pytest.approx(0.5 + 0.97 * 1.5)


def test_the_doctor_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time there was\nA dog and a cat\n")
    command = ["doctor", "--quality", "--quantization", "fp8", "--prompts", str(prompts)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] > 50
    assert 1e-4 < found["mean"] < found["p99"] < 3
    assert 0.8 < found["same"] <= 1
    assert main(command) == 0
    text = capsys.readouterr().out
    assert f"{found['tokens']} tokens of 2 texts" in text
    assert f"mean {found['mean']:.4f}, p99 {found['p99']:.4f}" in text
    assert f"{100 * found['same']:.2f} %" in text


def test_a_quantised_checkpoint_beside_what_it_stands_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, dense = quantized.make("awq", tmp_path, "llama")
    for each in (folder, dense):
        (each / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7, 8]}\n{"prompt": [9]}\n')
    given = ["--prompts", str(prompts), "--reference", str(dense), "--json"]
    assert main(["doctor", str(folder), "--quality", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean"] < 1e-5
    assert found["same"] == 1
    with pytest.raises(SystemExit):
        main(["doctor", str(folder), "--quality"])
    assert "--reference names the same in 16 bits" in capsys.readouterr().err
    assert main(["doctor", str(folder), "--quality", "--reference", str(folder)]) == 1
    assert "is quantised itself" in capsys.readouterr().err


def test_states_in_16_bits_beside_those_in_32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.make("qwen3_5", tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7, 8]}\n{"prompt": [9]}\n')
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    command = ["doctor", str(folder), "--quality", "--prompts", str(prompts)]
    command += ["--mamba-ssm-cache-dtype", "bfloat16"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1e-4 < found["mean"] < found["p99"] < 0.5
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "with states in bfloat16 beside" in text
    assert "with states in float32" in text


def test_an_8_bit_cache_beside_one_of_the_computation(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--quality", "--kv-cache-dtype", "fp8", "--max-model-len", "800"]
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["kv_cache"]
    assert (found["length"], found["tokens"]) == (799, 512)
    assert 1e-4 < found["mean"] < found["p99"] < 3
    assert 0.8 < found["same"] <= 1
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "the last 512 of 799 tokens" in text
    assert f"mean {found['mean']:.4f}, p99 {found['p99']:.4f}" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--quality"], "needs --quantization fp8"),
        (["--quality", "--mamba-ssm-cache-dtype", "bfloat16"], "no recurrent states"),
        (["--quality", "--quantization", "fp8", "--gpu", "h200"], "runs the model here"),
        (["--prompts", "a.txt"], "are for --quality"),
    ],
)
def test_what_makes_no_sense_is_said(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *given])
    assert words in capsys.readouterr().err
