"""A Qwen3 model that counts, whatever its layers add: the successor of a token is the next id.

The output projection has the embedding of token t as the row of token t + 1, and the layers are
random. What they add is larger than the embedding, but in many dimensions it hardly points to any
row. So its tokens are known, and no rounding changes them; but NaN does, and so does garbage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.text.tokenizers import byte_level

VOCAB = 512

#: Sizes of Qwen3-8B, except for the number of layers and tokens: 0.8 GB in bfloat16.
WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
}


def config_of(sizes: dict[str, int], vocab_size: int = VOCAB) -> dict[str, object]:
    """config.json of a Qwen3 model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": vocab_size - 1,
        **sizes,
    }


def make(folder: Path, sizes: dict[str, int], device: str = "cpu") -> Path:
    """Write a checkpoint and a tokenizer; the device computes the random numbers."""
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    kv_heads = sizes["num_key_value_heads"] * sizes["head_dim"]
    # Of what a layer adds; all of them together then miss another row by 12 standard deviations.
    gain = (hidden / sizes["num_hidden_layers"]) ** 0.5 / 17

    def draw(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        values *= gain * columns**-0.5
        return values.to("cpu", torch.bfloat16)

    embedding = draw(VOCAB, hidden, gain=hidden**0.5)
    head = 0.05 * embedding.roll(1, 0)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for number in range(sizes["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": draw(heads, hidden),
            "self_attn.k_proj": draw(kv_heads, hidden),
            "self_attn.v_proj": draw(kv_heads, hidden),
            "self_attn.o_proj": draw(hidden, heads, gain=0.4 * gain),
            "self_attn.q_norm": torch.ones(sizes["head_dim"], dtype=torch.bfloat16),
            "self_attn.k_norm": torch.ones(sizes["head_dim"], dtype=torch.bfloat16),
            "mlp.gate_proj": draw(inner, hidden),
            "mlp.up_proj": draw(inner, hidden),
            "mlp.down_proj": draw(hidden, inner, gain=1.5 * gain),
            "input_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
            "post_attention_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
        }
        tensors |= {f"model.layers.{number}.{name}.weight": x for name, x in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(sizes)))
    (folder / "tokenizer.json").write_text(byte_level())
    return folder


def successors(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    return [(prompt[-1] + 1 + i) % VOCAB for i in range(count)]
