"""Loading: every parameter filled once and from the right tensor, errors that name their cause."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.norm import GemmaRMSNorm, RMSNorm
from asyncllm.models.loading.loader import load_model
from asyncllm.models.quant.place import Each, Reordered, Slice, Sliced
from asyncllm.models.spec import read_spec
from tests.support.models import tiny_models

QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
Weights = dict[str, Tensor]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_models.make("llama", tmp_path / "llama")


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_places_of_a_checkpoint_cover_every_parameter_once(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path)
    model = _load(folder)
    places = model.checkpoint_tensors()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
        for place in places.values():
            assert not isinstance(place, Each)
            slices = place.slices if isinstance(place, Sliced) else [Slice(0, 0, place)]
            for _, _, part in slices:
                tensor = part.place if isinstance(part, Reordered) else part
                assert isinstance(tensor, Tensor)
                tensor.add_(1)
    assert all((parameter == 1).all() for parameter in model.parameters())


def test_fused_parameters_hold_the_rows_of_their_parts(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    places = _load(llama).state_dict()
    assert torch.equal(places["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(parts))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, dtype=stored)
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    model = _load(folder, dtype=wanted)
    assert all(parameter.dtype == wanted for parameter in model.parameters())
    assert torch.equal(model.state_dict()["model.norm.weight"], norm.to(wanted))


def test_shards_and_one_file_give_the_same_model(tmp_path: Path) -> None:
    one = tiny_models.make("qwen3_moe", tmp_path / "one", max_shard_size=10**9)
    many = tiny_models.make("qwen3_moe", tmp_path / "many", max_shard_size=50_000)
    assert len(list(many.glob("*.safetensors"))) > 3
    expected = _load(one).state_dict()
    for name, tensor in _load(many).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_tied_models_have_no_output_projection_of_their_own(tmp_path: Path) -> None:
    tied = _load(tiny_models.make("llama", tmp_path / "tied", tie_word_embeddings=True))
    untied = _load(tiny_models.make("llama", tmp_path / "untied", tie_word_embeddings=False))
    assert tied.lm_head is None
    assert untied.lm_head is not None
    assert isinstance(untied.lm_head.weight, Tensor)
    assert not torch.equal(untied.lm_head.weight, untied.state_dict()["model.embed_tokens.weight"])


def test_tensors_without_use_are_ignored(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, tie_word_embeddings=True)
    _rewrite(
        folder,
        lambda weights: (
            weights
            | {
                "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    _load(folder)


def test_opt_saved_without_its_wrapper(tmp_path: Path) -> None:
    folder = tiny_models.make("opt", tmp_path)
    expected = _load(folder).state_dict()
    _rewrite(folder, lambda weights: {k.removeprefix("model."): v for k, v in weights.items()})
    for name, tensor in _load(folder).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "granite_moe"]
)
def test_experts_as_transformers_holds_them(family: str, tmp_path: Path) -> None:
    """It writes them so if it is told to keep its own names."""
    folder = tiny_models.make(family, tmp_path / "published", max_shard_size=10**9)
    own = tmp_path / "own"
    tiny_models.reference(folder).save_pretrained(own, save_original_format=False)
    assert any(".experts.gate_up_proj" in name for name in load_file(own / "model.safetensors"))
    expected = _load(folder).state_dict()
    for name, tensor in _load(own).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_experts_apart_where_they_are_published_in_one_tensor(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_moe_vision", tmp_path)
    expected = _load(folder).state_dict()

    def apart(weights: Weights) -> Weights:
        parts: Weights = {}
        for name, tensor in weights.items():
            path, _, part = name.rpartition(".")
            if not path.endswith(".experts"):
                parts[name] = tensor
                continue
            for number, expert in enumerate(tensor.mT):
                chunks = expert.chunk(2) if part == "gate_up_proj" else (expert,)
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
                for chunk, each in zip(chunks, names, strict=True):
                    parts[f"{path}.{number}.{each}.weight"] = chunk.contiguous()
        return parts

    _rewrite(folder, apart)
    for name, tensor in _load(folder).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_tensors_without_numbers_are_ignored(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    empty = {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(0, 64)}
    _rewrite(folder, lambda weights: weights | empty)
    _load(folder)


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_moe", tmp_path)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    seen: list[tuple[int, int]] = []
    load_model(
        folder, read_spec(folder), torch.float32, "cpu", progress=lambda *done: seen.append(done)
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {of for _, of in seen} == {total}
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_dummy_weights_need_no_file_and_repeat(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    seen: list[tuple[int, int]] = []
    models = [
        load_model(
            folder,
            read_spec(folder),
            torch.bfloat16,
            "cpu",
            "dummy",
            lambda *done: seen.append(done),
        )
        for _ in range(2)
    ]
    first, second = (model.state_dict() for model in models)
    assert seen[-1][0] == seen[-1][1] == sum(p.nbytes for p in models[0].parameters())
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        if tensor.dim() > 1:
            assert tensor.float().std().item() == pytest.approx(0.02, rel=0.1)
    for module in models[0].modules():
        if isinstance(module, RMSNorm):
            neutral = 0.0 if isinstance(module, GemmaRMSNorm) else 1.0
            assert (module.weight == neutral).all()


def test_loading_works_in_inference_mode(llama: Path) -> None:
    with torch.inference_mode():
        assert _load(llama).lm_head is not None


def _drop(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != QUERY}


def _reshape(weights: Weights) -> Weights:
    return weights | {QUERY: torch.ones(64, 63)}


def _add(weights: Weights) -> Weights:
    return weights | {"model.layers.9.mlp.up_proj.weight": torch.ones(96, 64)}


def _quantize(weights: Weights) -> Weights:
    return weights | {QUERY: torch.ones(64, 64, dtype=torch.int8)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop, ["missing", "layers.0.self_attn.q_proj.weight", "[64, 64]"]),
        (_reshape, [QUERY, "[64, 63]", "expected [64, 64]", "model.safetensors"]),
        (_add, ["model.layers.9.mlp.up_proj.weight", "LlamaForCausalLM", "model.safetensors"]),
        (_quantize, [QUERY, "I8", "model.safetensors"]),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    change: Callable[[Weights], Weights], words: list[str], llama: Path
) -> None:
    _rewrite(llama, change)
    _assert_refused(llama, words)


@pytest.mark.parametrize(
    ("family", "missing", "named"),
    [
        (
            "qwen3_5",
            r"layers\.1\.linear_attn\.in_proj_b",
            "model.layers.1.linear_attn.in_proj_b.weight",
        ),
        ("qwen3_5", r"in_proj_b\.", "model.layers.0.linear_attn.in_proj_b.weight"),
        (
            "qwen3_next",
            r"layers\.0\.mlp\.shared_expert_gate",
            "model.layers.0.mlp.shared_expert_gate.weight",
        ),
        (
            "qwen3_5_moe_vision",
            r"layers\.1\.linear_attn\.A_log",
            "model.language_model.layers.1.linear_attn.A_log",
        ),
        ("lfm2", r"layers\.2\.conv\.in_proj\.weight", "model.layers.2.conv.in_proj.weight"),
        ("nemotron_h", r"layers\.2\.mixer\.o_proj", "backbone.layers.2.mixer.o_proj.weight"),
        ("nemotron_h", r"experts\.3\.up_proj", "backbone.layers.1.mixer.experts.3.up_proj.weight"),
    ],
)
def test_missing_tensors_have_the_names_of_the_checkpoint(
    family: str, missing: str, named: str, tmp_path: Path
) -> None:
    folder = tiny_models.make(family, tmp_path)
    _rewrite(folder, lambda all: {n: t for n, t in all.items() if not re.search(missing, n)})
    _assert_refused(folder, ["missing", repr(named)])


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_a_truncated_file(keep: float, llama: Path) -> None:
    path = llama / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    _assert_refused(llama, [str(path), "damaged or incomplete"])


def test_a_file_that_is_something_else(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(b"<html>Too many requests</html>" * 100)
    _assert_refused(llama, [str(path), "damaged or incomplete"])


def test_nothing_to_load(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "moved")
    _assert_refused(llama, ["no weights", "model.safetensors.index.json", "pytorch_model.bin"])


def test_a_broken_index(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_moe", tmp_path)
    shard = folder / "model-00002-of-00006.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    _assert_refused(folder, [str(shard), "is missing"])
    shard.write_bytes(content)
    for broken in ("", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\xff"):
        (folder / "model.safetensors.index.json").write_text(broken)
        _assert_refused(folder, ["model.safetensors.index.json", "not an index"])


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "a.safetensors")
    save_file({QUERY: weights[QUERY]}, folder / "b.safetensors")
    index = {"weight_map": {KEY: "a.safetensors", QUERY: "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _assert_refused(folder, ["b.safetensors", QUERY, "a.safetensors"])


def test_errors_are_short_when_everything_is_missing(llama: Path) -> None:
    _rewrite(llama, lambda weights: {"model.norm.weight": weights["model.norm.weight"]})
    with pytest.raises(ModelError, match="and 26 more"):
        _load(llama)


_MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from asyncllm.models.loading.loader import load_model
from asyncllm.models.quant.place import Reordered
from asyncllm.models.spec import read_spec

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(folder, dtype):
    '''Bytes of the model, and the most that was held while loading it.'''
    peak, stop = 0, threading.Event()

    def watch():
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, held())
            time.sleep(0.001)

    before = held()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, read_spec(folder), dtype, "cpu")
    stop.set()
    watcher.join()
    return sum(parameter.nbytes for parameter in model.parameters()), max(peak, held()) - before

folder = Path(sys.argv[1])
for dtype in (torch.bfloat16, torch.float32):
    torch.empty(1).to(dtype)
    print(*load(folder, dtype))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    """Pages of the mapped files do not count: the kernel takes them back when it needs them."""
    folder = _make_large(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder)], capture_output=True, text=True, check=True
    )
    for line in run.stdout.splitlines():
        size, peak = map(int, line.split())
        assert size > 140_000_000
        assert peak < 1.1 * size


def _make_large(folder: Path) -> Path:
    """A bfloat16 checkpoint of 150 MB, in two shards."""
    tiny_models.make(
        "llama",
        folder,
        vocab_size=16_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        dtype=torch.bfloat16,
        max_shard_size=100_000_000,
    )
    return folder


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, read_spec(folder), dtype, "cpu")


def _rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(weights), path)


def _assert_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        _load(folder)
    for word in words:
        assert word in str(caught.value)
