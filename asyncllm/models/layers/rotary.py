"""Rotary position encoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncllm.models.rope import RopeConfig


def rotary_table(rope: RopeConfig, max_length: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position: float32 [max_length, rotary_dim] (``HeadEncoding``).

    Args:
        max_length: positions are less than this. longrope uses its long factors for all sequences
            if max_length exceeds the original context, else its short ones. The choice cannot
            depend on a sequence's length, as the prefix cache shares keys between sequences.
    """
    if device.type == "meta":
        # Computing there would import PyTorch's compiler, which takes seconds.
        return torch.empty(max_length, rope.rotary_dim, dtype=torch.float32, device=device)
    frequencies, amplitude = rotary_frequencies(rope, max_length)
    positions = torch.arange(max_length, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def rotary_frequencies(rope: RopeConfig, max_length: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [rotary_dim / 2] on the CPU, and the factor of cos and sin.

    "dynamic" only changes positions beyond ``max_position_embeddings``, which no sequence has.
    """
    size = rope.spread or rope.rotary_dim
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / size
    spans = rope.rope_theta**exponents  # positions per radian
    match rope.rope_type:
        case "linear":
            return 1.0 / spans / rope.stretch, 1.0
        case "proportional":
            return 1.0 / spans / (rope.factor or 1.0), 1.0
        case "llama3":
            return _llama3(rope, 1.0 / spans), 1.0
        case "yarn":
            return _yarn(rope, spans), _yarn_amplitude(rope)
        case "longrope":
            is_long = max_length > rope.original_max_position_embeddings
            factors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
            return 1.0 / (factors * spans), _longrope_amplitude(rope)
    return 1.0 / spans, 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Stretch frequencies with less than ``low_freq_factor`` turns in the original context, keep
    those with more than ``high_freq_factor``, and blend in between."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / rope.stretch + kept * frequencies


def _yarn(rope: RopeConfig, spans: Tensor) -> Tensor:
    """Keep dimensions with more than ``beta_fast`` turns in the original context, stretch those
    with less than ``beta_slow``, and blend linearly in between."""

    def dimension(turns: float) -> float:
        """The dimension with this number of turns in the original context."""
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32.0), dimension(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    slowed = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1.0 / (rope.stretch * spans) * slowed + 1.0 / spans * (1 - slowed)


def _yarn_amplitude(rope: RopeConfig) -> float:
    def grown(slope: float) -> float:
        return 1.0 if rope.stretch <= 1 else 0.1 * slope * math.log(rope.stretch) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def _longrope_amplitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.stretch <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.stretch) / math.log(rope.original_max_position_embeddings))
