"""A small Qwen3 in plain PyTorch, laid out for training on rows of many lengths.

Parameters have the names of Hugging Face's ``Qwen3ForCausalLM``, so a state dict is a checkpoint.
All rows of a batch lie behind each other in one flat tensor of tokens; only attention sees rows.
That keeps the shapes of everything else the same from batch to batch, so it compiles once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Block = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_length: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self, eos: list[int], pad: int) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": eos[0],
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_length,
            "max_window_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def before_attention(
    x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor, dim: int, eps: float, dtype: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values of ``[tokens, heads, dim]`` from the residual stream."""
    h = _norm(x, layer["input_layernorm.weight"], eps).to(dtype)
    q, k, v = [
        F.linear(h, layer[f"self_attn.{name}_proj.weight"].to(dtype)).unflatten(-1, (-1, dim))
        for name in "qkv"
    ]
    q = _rotate(_norm(q, layer["self_attn.q_norm.weight"], eps), cos, sin).to(dtype)
    k = _rotate(_norm(k, layer["self_attn.k_norm.weight"], eps), cos, sin).to(dtype)
    return q, k, v


def after_attention(
    x: Tensor, attended: Tensor, layer: dict[str, Tensor], eps: float, dtype: Any
) -> Tensor:
    """Add attention's output and the gated MLP to the residual stream."""
    x = x + F.linear(attended, layer["self_attn.o_proj.weight"].to(dtype)).float()
    h = _norm(x, layer["post_attention_layernorm.weight"], eps).to(dtype)
    gate = F.linear(h, layer["mlp.gate_proj.weight"].to(dtype))
    up = F.linear(h, layer["mlp.up_proj.weight"].to(dtype))
    return x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"].to(dtype)).float()


def loss_of(
    x: Tensor, embedding: Tensor, norm: Tensor, targets: Tensor, eps: float, dtype: Any
) -> Tensor:
    """Return the mean loss over the tokens whose target is not -100."""
    logits = F.linear(_norm(x, norm, eps).to(dtype), embedding.to(dtype)).float()
    return F.cross_entropy(logits, targets)


def attention(q: Tensor, k: Tensor, v: Tensor, segments: list[tuple[int, int]]) -> Tensor:
    """Attend causally within each row; ``segments`` lists ``(rows, length)`` in order."""
    parts, start = [], 0
    for rows, length in segments:
        end = start + rows * length
        mine = [t[start:end].unflatten(0, (rows, length)).transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(
            mine[0], mine[1], mine[2], is_causal=True, enable_gqa=True
        )
        parts.append(out.transpose(1, 2).reshape(rows * length, -1))
        start = end
    return torch.cat(parts)


class Qwen3(nn.Module):
    """The model for training. ``compile()`` makes it faster where a compiler is at hand."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.weights = nn.ParameterDict()
        s = shape
        sizes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (s.hidden_size,),
            "self_attn.q_proj": (s.num_heads * s.head_dim, s.hidden_size),
            "self_attn.k_proj": (s.num_kv_heads * s.head_dim, s.hidden_size),
            "self_attn.v_proj": (s.num_kv_heads * s.head_dim, s.hidden_size),
            "self_attn.o_proj": (s.hidden_size, s.num_heads * s.head_dim),
            "self_attn.q_norm": (s.head_dim,),
            "self_attn.k_norm": (s.head_dim,),
            "post_attention_layernorm": (s.hidden_size,),
            "mlp.gate_proj": (s.intermediate_size, s.hidden_size),
            "mlp.up_proj": (s.intermediate_size, s.hidden_size),
            "mlp.down_proj": (s.hidden_size, s.intermediate_size),
        }
        self._add("model.embed_tokens.weight", (s.vocab_size, s.hidden_size), 0.04)
        for i in range(s.num_layers):
            for name, size in sizes.items():
                spread = size[-1] ** -0.5
                if name.endswith(("o_proj", "down_proj")):
                    spread /= (2 * s.num_layers) ** 0.5
                self._add(f"model.layers.{i}.{name}.weight", size, spread)
        self._add("model.norm.weight", (s.hidden_size,), 0)
        half = torch.arange(0, s.head_dim, 2).float() / s.head_dim
        angles = torch.outer(torch.arange(s.max_length).float(), s.rope_theta**-half)
        self.register_buffer("angles", torch.cat((angles, angles), -1), persistent=False)
        self._before: Block = before_attention
        self._after: Block = after_attention
        self._loss: Block = loss_of

    def _add(self, name: str, size: tuple[int, ...], spread: float) -> None:
        # A parameter's name may not hold a dot.
        value = torch.randn(size) * spread if len(size) > 1 else torch.ones(size)
        self.weights[name.replace(".", "/")] = nn.Parameter(value)

    def _named(self, prefix: str) -> dict[str, Tensor]:
        start = prefix.replace(".", "/")
        return {
            key[len(start) :].replace("/", "."): value
            for key, value in self.weights.items()
            if key.startswith(start)
        }

    def compile_blocks(self) -> None:
        """Compile everything but attention."""
        self._before = torch.compile(before_attention, dynamic=False)
        self._after = torch.compile(after_attention, dynamic=False)
        self._loss = torch.compile(loss_of, dynamic=False)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights under the names of Hugging Face's Qwen3, in bfloat16."""
        return {
            key.replace("/", "."): value.detach().to(torch.bfloat16).cpu().contiguous()
            for key, value in self.weights.items()
        }

    def hidden(self, ids: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        """Return the residual stream after the last layer for flat ``ids``."""
        s = self.shape
        places = torch.cat([
            torch.arange(length, device=ids.device).repeat(rows) for rows, length in segments
        ])  # fmt: skip
        angles = self.get_buffer("angles")[places].unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(ids, self.weights["model/embed_tokens/weight"])
        for i in range(s.num_layers):
            layer = self._named(f"model.layers.{i}.")
            q, k, v = self._before(x, layer, cos, sin, s.head_dim, s.eps, self.dtype)
            attended = attention(q, k, v, segments)
            x = self._after(x, attended, layer, s.eps, self.dtype)
        return x

    def logits(self, ids: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        """Return the logits of every token."""
        h = _norm(self.hidden(ids, segments), self.weights["model/norm/weight"], self.shape.eps)
        return F.linear(h, self.weights["model/embed_tokens/weight"])

    def forward(self, ids: Tensor, targets: Tensor, segments: list[tuple[int, int]]) -> Tensor:
        """Return the mean loss; a target of -100 does not count."""
        x = self.hidden(ids, segments)
        embedding = self.weights["model/embed_tokens/weight"]
        norm = self.weights["model/norm/weight"]
        loss: Tensor = self._loss(x, embedding, norm, targets, self.shape.eps, self.dtype)
        return loss
