"""Tiny EAGLE-3 heads on disk, and what they draft by the published equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
EPS, THETA = 1e-5, 10_000.0
#: Of the tiny models.
HIDDEN, VOCAB = 64, 384
DRAFTED = 200


def write(
    folder: Path,
    *,
    nested: bool = False,
    own_embedding: bool = False,
    reads: tuple[int, int, int] | None = None,
    norm_before_residual: bool = False,
    as_torch: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A random head, in the layout with ``midlayer`` or in that of nested settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
    }
    around: dict[str, Any] = {"draft_vocab_size": DRAFTED}
    if norm_before_residual:
        around["norm_before_residual"] = True
    if nested:
        around |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": config}
        around |= {} if reads is None else {"eagle_aux_hidden_state_layer_ids": reads}
        config = around
    else:
        around["architectures"] = ["LlamaForCausalLMEagle3"]
        if reads is not None:
            ids = [count - 1 for count in reads]
            around["eagle_config"] = {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": ids,
            }
        config |= around
    (folder / "config.json").write_text(json.dumps(config | settings))
    tensors = _tensors(seed, "layers.0." if nested else "midlayer.")
    if own_embedding:
        tensors["embed_tokens.weight"] = _random((VOCAB, HIDDEN), seed + 7, 0.5)
    if as_torch:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def _tensors(seed: int, layer: str) -> dict[str, Tensor]:
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (DRAFTED, HIDDEN),
        f"{layer}self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
    }
    tensors = {n: _random(shape, seed + i, 0.15) for i, (n, shape) in enumerate(shapes.items())}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for i, name in enumerate(["norm", *(layer + name for name in norms)]):
        tensors[f"{name}.weight"] = 1 + _random((HIDDEN,), seed + 100 + i, 0.2)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFTED].sort()[0]
    tensors["d2t"] = ids - torch.arange(DRAFTED)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def _random(shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Reference:
    """A head in plain torch, without a cache.

    Args:
        embedding: of tokens, [vocab, hidden].
    """

    def __init__(
        self, tensors: dict[str, Tensor], embedding: Tensor, norm_before_residual: bool = False
    ):
        self._tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        self._norm_before_residual = norm_before_residual

    def features(self, read: list[Tensor]) -> Tensor:
        """Of three hidden states of each token."""
        return linear(torch.cat(read, dim=1), self._tensors["fc.weight"])

    def step(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of all tokens of the model, and states, of tokens and states before each."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        embedded = self._norm(self._embedding[ids], "midlayer.input_layernorm")
        residual = normed if self._norm_before_residual else hidden
        x = residual + self._attention(torch.cat((embedded, normed), dim=1))
        fed = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (
            self._tensors[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        x = x + linear(silu(linear(fed, gate)) * linear(fed, up), down)
        own = linear(self._norm(x, "norm"), self._tensors["lm_head.weight"])
        scores = torch.full((len(ids), VOCAB), -torch.inf)
        scores[:, torch.arange(DRAFTED) + self._tensors["d2t"]] = own
        return scores, x

    def drafts(self, ids: list[int], read: list[Tensor], count: int) -> list[int]:
        """Tokens that follow: states are those of all tokens but the last one."""
        tokens, hidden = torch.tensor(ids[1:]), self.features(read)
        found: list[int] = []
        for _ in range(count):
            scores, states = self.step(tokens, hidden)
            best = scores[-1].argmax()
            found.append(int(best))
            tokens = torch.cat((tokens, best[None]))
            hidden = torch.cat((hidden, states[-1:]))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    def _attention(self, x: Tensor) -> Tensor:
        count = len(x)
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        q, k, v = (
            linear(x, self._tensors[f"midlayer.self_attn.{n}_proj.weight"])
            .view(count, size, HEAD_DIM)
            .transpose(0, 1)
            for n, size in heads.items()
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
        scores = q @ k.mT / HEAD_DIM**0.5
        scores = scores + torch.full((count, count), -torch.inf).triu(1)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        return linear(out, self._tensors["midlayer.self_attn.o_proj.weight"])


def _rotated(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    frequencies = THETA ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((angles.sin(),) * 2, 1)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
