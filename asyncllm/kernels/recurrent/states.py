"""Which states a step's rows read and write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class LayerState(NamedTuple):
    """The states of all sequences in one layer; slots may be far apart in memory.

    Slot 0 is no sequence's: rows that pad a step read and write it.

    Attributes:
        inputs: [slots, width, channels], the last ones of the short convolution, in order.
        matrices: float32 [slots, heads, keys, values]; None in layers that have none.
    """

    inputs: Tensor
    matrices: Tensor | None


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, for recurrent layers. The host never reads them where kernels run, so a
    captured launch can serve other rows later.

    Attributes:
        slots: int32 [rows]; the slot of each row's state.
        starts: int32 [rows]; the position of its first token. At 0, and below for padding, the
            state is empty, whatever its slot has.
        offsets: int32 [rows + 1], ascending: the step's tokens offsets[i] .. offsets[i + 1] - 1 are
            those of row i, maybe none. Tokens after the last row are padding.
        one_token: every row has one token, and row i has token i.
        found: what kernels have computed about the rows, kept for the following layers.
    """

    slots: Tensor
    starts: Tensor
    offsets: Tensor
    one_token: bool
    found: dict[int, Tensor] = field(init=False, default_factory=dict)

    def on_host(self) -> list[tuple[int, int, int, int]]:
        """(slot, start, first token, token after the last) of each row with tokens."""
        bounds = self.offsets.tolist()
        rows = zip(self.slots.tolist(), self.starts.tolist(), bounds, bounds[1:], strict=False)
        return [row for row in rows if row[3] > row[2]]
