"""What recurrent layers keep of a sequence."""

from __future__ import annotations

from typing import Final, NamedTuple

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
