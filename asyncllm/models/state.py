"""What recurrent layers keep of a sequence."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from asyncllm.errors import ModelError

#: Bytes of a number, by ``StateShape.dtype``.
STATE_BYTES: Final = {"float32": 4, "bfloat16": 2}


class StateShape(NamedTuple):
    """What a recurrent layer keeps of one sequence, whatever its length.

    Attributes:
        channels, width: of its short convolution, which sees ``width`` tokens: their inputs, in the
            model's dtype.
        heads, keys, values: a matrix [keys, values] of each head; none with 0 heads.
        dtype: of the matrices, "float32" or "bfloat16".
    """

    channels: int
    width: int
    heads: int = 0
    keys: int = 0
    values: int = 0
    dtype: str = "float32"

    @property
    def num_inputs(self) -> int:
        """Elements of the inputs."""
        return self.channels * self.width

    @property
    def num_elements(self) -> int:
        """Elements of the matrices."""
        return self.heads * self.keys * self.values

    def num_bytes(self, itemsize: int) -> int:
        """Of the whole state, in a model whose numbers have that many bytes."""
        return self.num_inputs * itemsize + STATE_BYTES[self.dtype] * self.num_elements


#: JSON has no infinity, so transformers writes it as an object.
_Number = float | dict[str, str]
#: ``time_step_limit`` of config.json.
StepLimit = tuple[_Number, _Number]


def step_limits(given: StepLimit | None) -> tuple[float, float]:
    """The least and the greatest step of Mamba-2.

    Raises:
        ModelError: what config.json has is no number.
    """
    least, greatest = given or (0.0, math.inf)
    return _number(least), _number(greatest)


def _number(value: _Number) -> float:
    if not isinstance(value, dict):
        return value
    try:
        return float(value["__float__"])
    except (KeyError, ValueError):
        raise ModelError(f"time_step_limit has {value}, which is no number") from None
