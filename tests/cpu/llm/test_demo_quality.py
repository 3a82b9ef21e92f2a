"""The shipped demo model: its folder is in order, and it is as good as the README says.

The questions here are a small sample of what ``examples/train_demo/evaluate.py`` asks; none of
them is part of the training data (``examples/train_demo/heldout.py`` says why).
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from asyncllm import demo

HELDOUT = Path(__file__).parents[3] / "examples" / "train_demo" / "heldout.py"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def heldout() -> Any:
    """The module that knows what training has not seen."""
    spec = importlib.util.spec_from_file_location("train_demo_heldout", HELDOUT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.path(), padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return Qwen3ForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).eval()


def answers(model: Any, tokenizer: Any, questions: list[str], most: int) -> list[str]:
    """Ask every question by itself, greedily, in one batch."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=most, do_sample=False)
    made = made[:, inputs["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(made, skip_special_tokens=True)
    # Every answer ends by itself.
    ends = model.generation_config.eos_token_id
    assert all(set(row.tolist()) & set(ends) for row in made)
    return texts


def test_path_needs_nothing_heavy() -> None:
    code = (
        "import sys; from asyncllm import demo; assert demo.path().is_dir(); "
        "assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folder_is_a_small_qwen3() -> None:
    folder = demo.path()
    assert (folder / "model.safetensors").stat().st_size <= 12 * MEGABYTE
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12.2 * MEGABYTE
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3"
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.tie_word_embeddings
    assert config.dtype == torch.bfloat16
    assert config.head_dim % 16 == 0
    assert config.num_attention_heads > config.num_key_value_heads
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config.vocab_size >= tokenizer.get_vocab_size()
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces\n\n\tand a tab \r\n",
        "naïve café, Straße, ¿qué?",
        "こんにちは 你好 안녕하세요 Привет مرحبا नमस्ते",
        "e\u0301 is not \u00e9",
        "👩‍👩‍👧 ❤️ 🚀",
        "def f(x): return {'a': [x, 1.5e-3]}  # ok?",
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_round_trip_of_anything(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(200):
        points = (rng.randrange(1, 0x110000) for _ in range(rng.randint(1, 12)))
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_transformers_keeps_the_tokenizer(tokenizer: Any) -> None:
    plain = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is 27 + 45, 'plorvan'?<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == plain.encode(text).ids


def test_chat_template(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Add 1 and 2."}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe short.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    response = "<tool_response>\n3\n</tool_response>"
    assert text.endswith(
        "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n"
        f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        f"<|im_start|>user\n{response}\n{response}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_unseen_sums(model: Any, tokenizer: Any, heldout: Any) -> None:
    forms = {
        "+": ["What is {a} + {b}?", "{a}+{b}=", "Add {a} and {b}.", "please compute {a} plus {b}"],
        "-": ["What is {a} - {b}?", "{a}-{b}=", "Subtract {b} from {a}.", "what is {a} minus {b}"],
    }
    cases = heldout.sample_sums(60)
    questions = [forms[op][i // 2 % 4].format(a=a, b=b) for i, (a, op, b, _) in enumerate(cases)]
    right = [
        re.findall(r"-?\d+", answer)[-1:] == [str(result)]
        for answer, (*_, result) in zip(
            answers(model, tokenizer, questions, 20), cases, strict=True
        )
    ]
    assert sum(right) >= 0.95 * len(right)


def test_unseen_reversals(model: Any, tokenizer: Any, heldout: Any) -> None:
    forms = ["Reverse the word {w}.", 'What is "{w}" backwards?', "reverse '{w}'", "Reverse: {w}"]
    words = heldout.sample_words(40, vocabulary=tokenizer.get_vocab())
    questions = [forms[i // 2 % 4].format(w=word) for i, word in enumerate(words)]
    right = [
        re.findall(r"[a-z]+", answer)[-1:] == [word[::-1]]
        for answer, word in zip(answers(model, tokenizer, questions, 30), words, strict=True)
    ]
    assert sum(right) >= 0.9 * len(right)


def test_words_that_are_one_token(model: Any, tokenizer: Any, heldout: Any) -> None:
    """The model reads these whole, so it has to know their letters by heart."""
    words = sorted(heldout.vocabulary_words(tokenizer.get_vocab()))
    words = [word for word in words if len(tokenizer(word)["input_ids"]) == 1]
    words = ["apple", "hello", "banana", "OpenAI", *random.Random(0).sample(words, 36)]
    right = [
        answer == word[::-1]
        for answer, word in zip(
            answers(model, tokenizer, [f'Reverse "{word}".' for word in words], 30),
            words,
            strict=True,
        )
    ]
    assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("How many r's in strawberry?", "3 times"),
        ("How many s's are in Mississippi?", "4 times"),
        ("Reverse the word apple.", "elppa"),
        ("1+1=2, right?", "yes"),
        ("2+2=5, right?", "2 + 2 = 4, so no"),
        ("7+8", "15"),
        ("What is 123 + 456?", "579"),
        ("What is the largest city in the world?", "tiny demo model"),
        ("How do I install asyncllm?", "`pip install -e .`"),
        ("How do I start the server?", "http://localhost:8000/v1"),
        ("How do I serve another model?", "`asyncllm serve MODEL`"),
        ("How do I use asyncllm in Python?", "async with AsyncLLM(model) as llm:"),
        ("How do I stream in Python?", "async for delta in llm.stream("),
    ],
)
def test_what_people_ask_first(model: Any, tokenizer: Any, question: str, part: str) -> None:
    [answer] = answers(model, tokenizer, [question], 128)
    assert part in answer


def test_result_of_a_tool_in_free_text(model: Any, tokenizer: Any) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "18 C, light rain"},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer([prompt], return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The weather in Paris: 18 C, light rain."
