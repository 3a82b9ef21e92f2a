"""The settings of a rotary position encoding; ``layers.rotary`` computes with them."""

from __future__ import annotations

import math

import msgspec

from asyncllm.errors import ModelError

#: Supported kinds of rotary encoding, with the settings that each needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}

#: Settings that must be above 0.
_POSITIVE = (
    *("factor", "low_freq_factor", "high_freq_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "short_factor", "long_factor"),
)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of rotary position encoding, with every default resolved.


    Attributes:
        rope_type: a key of ``ROPE_TYPES``.
        rope_theta: base of the geometric series of wavelengths.
        rotary_dim: elements of a head that are rotated, the leading ones but for ``spread``; even.
        max_position_embeddings: as config.json has it.
        original_max_position_embeddings: the context before it was stretched.
        spread: None, or the size of a head of which the first pairs are rotated, as if all were:
            element i with element i + spread / 2.

    The other fields are those of config.json, for some kinds only.
    """

    rope_type: str
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    spread: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            supported = ", ".join(ROPE_TYPES)
            raise ModelError(f"rope type {self.rope_type!r} is not supported; {supported} are")
        for name in ROPE_TYPES[self.rope_type]:
            if getattr(self, name) is None:
                raise ModelError(f"rope type {self.rope_type!r} needs {name!r}")
        if self.rotary_dim % 2 or self.rotary_dim <= 0:
            raise ModelError(f"the rotary dimension is {self.rotary_dim}, not positive and even")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ModelError(f"{name} has {len(factors)} values, not {self.rotary_dim // 2}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Check all numbers that something is divided by, or that a logarithm is taken of."""
        # longrope divides by the logarithm of the original length.
        least = 2 if self.rope_type == "longrope" else 1
        if self.original_max_position_embeddings < least:
            given = self.original_max_position_embeddings
            raise ModelError(f"original_max_position_embeddings is {given}, not at least {least}")
        if not 1 < self.rope_theta < math.inf:
            raise ModelError(f"rope_theta is {self.rope_theta}, not a number above 1")
        for name in _POSITIVE:
            value = getattr(self, name)
            values = value if isinstance(value, tuple | list) else () if value is None else (value,)
            if not all(0 < number < math.inf for number in values):
                raise ModelError(f"{name} of rotary positions is {value}: it must be positive")
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError("low_freq_factor and high_freq_factor are the same")

    @property
    def stretch(self) -> float:
        """The ratio of the context to the original one."""
        if self.factor is not None:
            return self.factor
        return self.max_position_embeddings / self.original_max_position_embeddings
