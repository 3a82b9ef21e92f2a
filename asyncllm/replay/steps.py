"""The steps of a trace, with their shapes and measured times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RecordedStep(NamedTuple):
    """A step of a trace.

    Attributes:
        starts, lengths: int64 [n]; tokens already cached, and new ones, of each row.
        num_samples: rows that sample.
        decode_steps: tokens that it yields of each row.
        planned: time of the plan; ``alone``: no other step was in flight then.
        reported: time of its result on the event loop.
        seconds: on the device.
    """

    starts: np.ndarray
    lengths: np.ndarray
    num_samples: int
    decode_steps: int
    planned: float
    alone: bool
    reported: float = 0.0
    seconds: float = 0.0
