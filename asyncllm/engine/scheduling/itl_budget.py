"""ItlBudget: how long a step may take, with a target that 99 of 100 tokens keep."""

from __future__ import annotations

#: The share of the tokens that may come later than the target after the one before.
LATE_SHARE = 0.01
#: Late tokens that are allowed at once, after a long time without any.
MOST_SAVED = 1000.0
#: Seconds of prompts that wait from which on a step may be late, and its length in targets.
BACKLOG_SECONDS, LONG_STEP = 0.2, 8.0
#: The share of the target that steps are planned to take; the rest is for errors of the prediction.
PLANNED_SHARE = 0.92


class ItlBudget:
    """Spends late tokens where they help most: when prompts pile up.

    With many decode rows, a step within the target is mostly decode rows, and prompts arrive faster
    than the rest of it computes them. One long step takes as many prompt tokens as ten short ones,
    and decodes once. So tokens in time are saved up, and a long step spends one for each of its
    decode rows.

    8B on a simulated H200, the first 3,000 requests of Azure's conversations of 2023, four times as
    fast (``examples/bench_policies.py azure.csv --speed 4 --limit 3000``), in ms:

    |                    | TTFT p50 | p99 | ITL p50 | p99   |
    |--------------------|----------|-----|---------|-------|
    | no target          | 109      | 404 | 12.3    | 158.8 |
    | 27, no long steps  | 76       | 819 | 17.4    | 26.5  |
    | **27, long steps** | 76       | 532 | 12.6    | 26.4  |

    Attributes:
        planned: the seconds that other steps may take; 0: no limit.
    """

    def __init__(self, target: float):
        """``target``: seconds between two tokens; 0: none."""
        self.planned = PLANNED_SHARE * target
        self._target = target
        self._saved = 0.0

    def saw_step(self, num_rows: int, seconds: float) -> None:
        """A step with ``num_rows`` decode rows took ``seconds``."""
        if seconds > self._target:
            self._saved -= num_rows
        else:
            self._saved = min(MOST_SAVED, self._saved + LATE_SHARE * num_rows)

    def long_step(self, num_rows: int, backlog: float) -> float:
        """The seconds of a long step with ``num_rows`` decode rows; 0.0 if it is not worth one.

        Args:
            backlog: seconds that the prompts take that wait or have begun.
        """
        worth_it = backlog > BACKLOG_SECONDS and self._saved >= num_rows
        return LONG_STEP * self._target if worth_it else 0.0
